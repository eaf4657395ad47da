// One WebSocket for all generations of the page, opened when one is asked for. Where it is refused, generations go over
// server-sent events from then on.

import { keyHeaders, keyProtocols } from "./api.js";
import { generateByEvents } from "./event_stream.js";

export class GenerationSocket {
  #socket = null;
  #running = new Map();
  #lastId = 0;
  // Why there is no WebSocket; null while there may be one.
  #refusal = null;

  // Starts a generation. `listener` has started, tokens, finished and failed, each called with the service's message;
  // finished or failed is the last. Returns what cancels it.
  generate(request, listener) {
    if (this.#refusal) return generateByEvents(request, listener, this.#refusal);
    const id = String(++this.#lastId);
    const socket = this.#open();
    const one = { listener, request, cancel: null };
    this.#running.set(id, one);
    const send = (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));
    const begin = () => send({ type: "generate", id, request });
    if (socket.readyState === WebSocket.OPEN) begin();
    else socket.addEventListener("open", begin, { once: true });
    return () => {
      if (one.cancel) one.cancel();
      if (!this.#running.has(id)) return;
      if (socket.readyState === WebSocket.CONNECTING) socket.addEventListener("open", () => send({ type: "cancel", id }));
      else send({ type: "cancel", id });
    };
  }

  #open() {
    if (this.#socket?.readyState <= WebSocket.OPEN) return this.#socket;
    this.#lose(this.#socket, "");
    const url = new URL("v1/stream", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new WebSocket(url, keyProtocols());
    let wasOpen = false;
    socket.addEventListener("open", () => (wasOpen = true));
    socket.addEventListener("message", (event) => this.#hear(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => (wasOpen ? this.#lose(socket, event.reason) : this.#fallBack(socket)));
    this.#socket = socket;
    return socket;
  }

  #hear(message) {
    const one = this.#running.get(message.id);
    if (!one) return;
    if (message.type === "finished" || message.type === "error") this.#running.delete(message.id);
    if (message.type === "error") one.listener.failed(message.error.message);
    else one.listener[message.type]?.(message);
  }

  // The socket never opened. A browser does not say why, so the same address is asked without an upgrade: a service that
  // is reached answers 400, and then something in between has not passed the upgrade on.
  async #fallBack(socket) {
    if (this.#socket !== socket) return;
    this.#socket = null;
    const waiting = [...this.#running.values()];
    this.#running.clear();
    let status = 0;
    try {
      status = (await fetch(new URL("v1/stream", document.baseURI), { headers: keyHeaders() })).status;
    } catch {
      // Nothing answers: it is no matter of the WebSocket.
    }
    if (status === 400) this.#refusal = "Over an event stream: a proxy does not let the WebSocket through.";
    for (const one of waiting) {
      if (status === 400) one.cancel = generateByEvents(one.request, one.listener, this.#refusal);
      else if (status) one.listener.failed(`The WebSocket was refused: v1/stream answers ${status}.`);
      else one.listener.failed("The connection to the service was lost.");
    }
  }

  #lose(socket, reason) {
    if (this.#socket !== socket) return;
    this.#socket = null;
    const waiting = [...this.#running.values()];
    this.#running.clear();
    for (const one of waiting) one.listener.failed(reason || "The connection to the service was lost.");
  }
}
