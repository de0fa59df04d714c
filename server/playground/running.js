/* At most one thing runs at a time, a chat or a comparison, and can be stopped. */

import { $ } from "./page.js";

let running = null; // the AbortController of what runs

export const busy = () => running !== null;
export const stop = () => running?.abort();

/* Runs `work`, while the button that sends is one that stops. */
export async function whileRunning(work) {
  running = new AbortController();
  show("Stop", "Esc");
  try {
    await work(running.signal);
  } finally {
    running = null;
    show("Send", "Enter");
  }
}

function show(text, key) {
  $("send").textContent = text;
  $("send").title = key;
  $("send").classList.toggle("stop", busy());
  document.body.classList.toggle("busy", busy());
  document.dispatchEvent(new Event("running"));
}

/* Keeps the newest line in view, unless the reader has scrolled away from it. */
export function follow() {
  const main = document.querySelector("main");
  if (main.scrollHeight - main.scrollTop - main.clientHeight < 160) main.scrollTop = main.scrollHeight;
}
