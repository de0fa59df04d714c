/* One prompt without drafts and with them, side by side. */

import { $, element, share } from "./page.js";
import { Reply } from "./reply.js";
import { whileRunning } from "./running.js";
import { chunks } from "./server.js";
import { DRAFTS, FieldError, body, goTo } from "./settings.js";
import { pending } from "./status.js";

const VERDICT = "The same prompt, without drafts and with them.";

function explain(order) {
  const apart = "One after the other: each has the device to itself, and both find the prompt in the prefix cache.";
  const together = "Together: both run in one batch, and the time of each holds the other's work.";
  const early = `The server is still compiling ${pending()} of its programs, so the times don't say much yet.`;
  return (order === "apart" ? apart : together) + (pending() ? ` ${early}` : "");
}

function verdict(head, small) {
  $("verdict").replaceChildren(head, element("small", "", small));
}

export const start = () => verdict(VERDICT, explain($("order").value));

export async function compare(text) {
  const order = $("order").value;
  const replies = {};
  const seed = Math.floor(Math.random() * 2 ** 31);
  const asked = (drafts, more) => {
    const { fixed_drafts: _, speculative: __, ...rest } = body([{ role: "user", content: text }], {
      ...($("seed").value === "" && { seed }),
      logprobs: null, // they take time
      top_logprobs: null,
    });
    return { ...rest, ...DRAFTS[drafts], ...more };
  };
  const watch = () => {
    const longest = Math.max(...Object.values(replies).map((reply) => reply.elapsed));
    for (const [side, reply] of Object.entries(replies)) {
      $(side).querySelector(".clock").textContent = reply.lastAt === null ? "" : `${reply.elapsed.toFixed(2)} s`;
      share($(side).querySelector(".race"), reply.elapsed / longest);
    }
  };
  const side = (name, drafts, signal) => {
    replies[name] = new Reply($(name).querySelector(".reply"));
    return replies[name].run(asked(drafts), signal, watch);
  };
  for (const name of ["plain", "drafted"]) {
    $(name).querySelector(".reply").replaceChildren();
    $(name).querySelector(".clock").textContent = "";
    share($(name).querySelector(".race"), 0);
  }
  await whileRunning(async (signal) => {
    verdict("Running…", explain(order));
    let errors = [];
    if (order === "together") {
      errors = await Promise.all([side("plain", "none", signal), side("drafted", "all", signal)]);
    } else {
      errors = [await warm(() => asked("none", { max_tokens: 1 }), signal)];
      if (!errors[0]) errors = [await side("plain", "none", signal)];
      if (!errors[0]) errors = [await side("drafted", "all", signal)];
    }
    const error = errors.find(Boolean);
    if (!error) return judge(replies.plain, replies.drafted, order);
    verdict(error.name === "AbortError" ? "Stopped." : error.message, explain(order));
    if (error instanceof FieldError) goTo(error.field);
    if (error.status === 401) goTo("key");
  });
}

/* Has the prompt computed, so that the first of two runs doesn't pay for it alone. */
async function warm(request, signal) {
  try {
    for await (const _ of chunks(request(), signal));
    return null;
  } catch (error) {
    return error;
  }
}

function judge(plain, drafted, order) {
  const same = plain.text === drafted.text;
  const greedy = Number($("temperature").value) === 0;
  const ratio = same ? plain.elapsed / drafted.elapsed : drafted.rate / plain.rate;
  const times = (value) => `${value.toFixed(value < 10 ? 2 : 1)}×`;
  const speed =
    drafted.undrafted ? "nothing was drafted" :
    ratio >= 1.03 ? `${times(ratio)} as fast with drafts` :
    ratio <= 0.97 ? `with drafts it took ${times(1 / ratio)} as long` : "no difference in time";
  const count = plain.tokens.length;
  if (same) return verdict(`Identical text, ${count} ${count === 1 ? "token" : "tokens"}; ${speed}.`, explain(order));
  let part = 0;
  while (plain.text[part] === drafted.text[part]) part += 1;
  const why = greedy
    ? "At temperature 0 only a near tie between two tokens, rounded differently, should part them."
    : "Both are samples of one distribution; this drafter's drafts are verified by rejection, with random numbers of its own.";
  verdict(`The texts part at character ${part + 1}; ${speed}.`, `${why} Speeds are compared in tokens a second. ${explain(order)}`);
}
