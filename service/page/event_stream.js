// Server-sent events in place of the WebSocket, where something between browser and service does not let that through.

import { keyHeaders } from "./api.js";

// Starts a generation, of which the listener hears what it would over the WebSocket. Which proposer guessed a token is not
// part of these events. Returns what cancels it.
export function generateByEvents(request, listener, notice) {
  const controller = new AbortController();
  answer(request, listener, notice, controller.signal).catch((error) => {
    listener.failed(error.name === "AbortError" ? "Cancelled." : error.message || "The connection to the service was lost.");
  });
  return () => controller.abort();
}

async function answer(request, listener, notice, signal) {
  const body = {
    ...request, stream: true, stream_options: { include_usage: true }, logprobs: true, return_token_ids: true,
  };
  const response = await fetch(new URL("v1/chat/completions", document.baseURI), {
    method: "POST", headers: { "Content-Type": "application/json", ...keyHeaders() }, body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error(await problem(response));
  const [experiment, arm] = ["Experiment", "Arm"].map((name) => response.headers.get(`X-Forerun-${name}`) ?? undefined);
  listener.started({ experiment, arm, notice });
  const bytes = new TextDecoder();
  const choice = { index: 0, finish_reason: "length", stop_reason: null };
  let position = 0;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    for (const { delta, logprobs, token_ids: ids = [], finish_reason: reason, stop_reason: stop = null } of event.choices) {
      const tokens = ids.map((id, i) => {
        const row = logprobs?.content?.[i];
        const offset = position;
        position += [...bytes.decode(new Uint8Array(row?.bytes ?? []), { stream: true })].length;
        return { id, logprob: row?.logprob ?? null, source: "unknown", offset };
      });
      if (tokens.length || delta.content) listener.tokens({ index: 0, text: delta.content ?? "", tokens });
      if (reason) Object.assign(choice, { finish_reason: reason, stop_reason: stop });
    }
    if (event.usage) {
      listener.finished({ choices: [choice], usage: event.usage, metrics: event.metrics, seed: event.seed });
      return;
    }
  }
  throw new Error("The connection to the service was lost.");
}

// The events of a body, without comments and the closing [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `v1/chat/completions answers ${response.status}`;
  }
}
