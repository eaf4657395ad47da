// One WebSocket for all generations of the page, opened when one is asked for.

import { keyProtocols } from "./api.js";

export class GenerationSocket {
  #socket = null;
  #running = new Map();
  #lastId = 0;

  // Starts a generation. `listener` has started, tokens, finished and failed, each called with the service's message;
  // finished or failed is the last. Returns what cancels it.
  generate(request, listener) {
    const id = String(++this.#lastId);
    const socket = this.#open();
    this.#running.set(id, listener);
    const send = (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));
    const begin = () => send({ type: "generate", id, request });
    if (socket.readyState === WebSocket.OPEN) begin();
    else socket.addEventListener("open", begin, { once: true });
    return () => {
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
    socket.addEventListener("message", (event) => this.#hear(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => this.#lose(socket, event.reason));
    this.#socket = socket;
    return socket;
  }

  #hear(message) {
    const listener = this.#running.get(message.id);
    if (!listener) return;
    if (message.type === "finished" || message.type === "error") this.#running.delete(message.id);
    if (message.type === "error") listener.failed(message.error.message);
    else listener[message.type]?.(message);
  }

  #lose(socket, reason) {
    if (this.#socket !== socket) return;
    this.#socket = null;
    const listeners = [...this.#running.values()];
    this.#running.clear();
    for (const listener of listeners) listener.failed(reason || "The connection to the service was lost.");
  }
}
