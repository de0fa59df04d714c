/* Calls to the server that the page came from. */

/* Addresses are relative, so that a proxy may serve the page under a path of its own. */
const HERE = new URL("..", import.meta.url);

export class ServerError extends Error {
  constructor(message, status) {
    super(sentence(message));
    this.status = status;
  }
}

export const key = { value: "" }; // kept in the page's memory alone

export async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  let response;
  try {
    response = await fetch(new URL(path, HERE), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server can't be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ServerError(body.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

/* The chunks of a chat completion, as they come. */
export async function* chunks(body, signal) {
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", complete = false; ; ) {
    const { value = "", done } = await read(reader);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") complete = true;
      else if (event.startsWith("data: ")) yield parsed(event.slice(6));
    }
    if (complete) return;
    if (done) throw new ServerError("The reply ended early: the server closed the connection.", 0);
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The reply ended early: the connection was lost.", 0);
  }
}

function parsed(text) {
  const chunk = JSON.parse(text);
  if (chunk.error) throw new ServerError(chunk.error.message, 200);
  return chunk;
}

/* "max_tokens is 0" stays as it is but for the full stop; a plain word gets a capital. */
export function sentence(text) {
  const capital = /^[a-z]+['\s,:]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?…]$/.test(capital) ? capital : `${capital}.`;
}
