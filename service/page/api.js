// The service's REST routes. Addresses are relative, so the page also works behind a path.

export class ServiceError extends Error {
  constructor(message, param, status) {
    super(message);
    this.param = param;
    this.status = status;
  }
}

// Where the service has API keys, the one of whoever uses the page; forgotten with the tab.
const KEY = "forerun-key";

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

// Its bytes, one character each, as headers and base64 want them.
function keyBytes() {
  return String.fromCharCode(...new TextEncoder().encode(sessionStorage.getItem(KEY) ?? ""));
}

// What a WebSocket has in place of a header.
export function keyProtocols() {
  const key = keyBytes();
  return key ? ["forerun", `forerun.key.${btoa(key).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`] : [];
}

export function keyHeaders() {
  const key = keyBytes();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// The JSON of an answer; throws `ServiceError` with the service's own words.
export async function call(method, path, body) {
  const options = { method, headers: keyHeaders() };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), options);
  } catch {
    throw new ServiceError("The service does not answer.", null, 0);
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    // Something in between answered in its own way.
  }
  if (!response.ok) {
    const error = answer?.error;
    throw new ServiceError(error?.message ?? `${path} answers ${response.status}`, error?.param ?? null, response.status);
  }
  return answer;
}

export function experimentPath(name, verb) {
  return `v1/experiments/${encodeURIComponent(name)}${verb ? `/${verb}` : ""}`;
}

// Calls `look` again and again while `isWanted` says so; never two at a time.
export class Poll {
  #look;
  #isWanted;
  #seconds;
  #timer = null;
  #running = null;

  constructor(look, isWanted, seconds) {
    this.#look = look;
    this.#isWanted = isWanted;
    this.#seconds = seconds;
    document.addEventListener("visibilitychange", () => this.start());
  }

  start() {
    if (this.#timer == null && !this.#running) this.#turn();
  }

  // A look right now; resolves when it is done.
  async now() {
    await this.#running;
    await this.#turn();
  }

  async #turn() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (document.hidden || !this.#isWanted()) return;
    this.#running = this.#look().finally(() => (this.#running = null));
    await this.#running;
    this.#timer = setTimeout(() => this.#turn(), 1000 * this.#seconds);
  }
}
