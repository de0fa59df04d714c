/* One reply, shown as it comes: its text, the calls it makes, and below it the figures.

   The stream tells the text twice: as the answer (`content`, and `reasoning_content` where the model thinks first), and
   token by token as the model wrote it, markers included. The answer is what is shown; the tokens colour it. */

import { rendered } from "./markdown.js";
import { element, share } from "./page.js";
import { chunks } from "./server.js";
import { SOURCES, colour, span } from "./tokens.js";

const REDRAW = 80; // milliseconds between renderings of a text that grows

const seconds = () => performance.now() / 1000;
export const asTokens = () => document.body.classList.contains("as-tokens");

/* A text of a reply in pieces of tokens (tokens.js), as Markdown or token by token. */
class Passage {
  constructor(className) {
    this.node = element("div", className);
    this.node.tabIndex = 0;
    this.node.setAttribute("role", "group");
    this.pieces = [];
    this.drawn = 0; // pieces, where they are shown token by token
    this.mode = null;
    this.timer = null;
  }

  get text() {
    return this.pieces.map(([text]) => text).join("");
  }

  push(text, token) {
    if (text) this.pieces.push([text, token]);
  }

  draw(now = true) {
    if (asTokens()) {
      if (this.mode !== "tokens") this.node.replaceChildren();
      if (this.mode !== "tokens") this.drawn = 0;
      this.mode = "tokens";
      this.node.append(...this.pieces.slice(this.drawn).map(([text, token]) => span(text, token)));
      this.drawn = this.pieces.length;
    } else if (!now) {
      this.timer ??= setTimeout(() => this.draw(), REDRAW);
      return;
    } else {
      const fragment = rendered(this.text);
      colour(fragment, this.pieces);
      this.node.replaceChildren(fragment);
      this.mode = "rendered";
    }
    clearTimeout(this.timer);
    this.timer = null;
    this.node.classList.toggle("rendered", this.mode === "rendered");
  }
}

export class Reply {
  constructor(host) {
    this.host = host;
    this.tokens = [];
    this.ahead = []; // tokens whose text isn't shown yet: [rest of the text, token]
    this.calls = [];
    this.counts = Object.fromEntries(SOURCES.map((source) => [source, 0]));
    this.round = 0;
    this.place = 0; // of the newest token in its round
    this.started = seconds();
    this.firstAt = this.lastAt = this.finish = this.usage = this.speculation = this.thoughts = null;
    this.answer = new Passage("text");
    this.answer.node.setAttribute("aria-label", "Reply; arrow keys step through its tokens");
    this.called = element("div", "calls");
    this.shares = element("div", "shares");
    this.shares.append(...SOURCES.map((source) => element("i", source)));
    this.shares.hidden = true;
    this.figures = element("p", "figures small");
    host.replaceChildren(this.answer.node, this.called, this.shares, this.figures);
    host.reply = this;
  }

  get text() {
    return this.answer.text;
  }

  get anything() {
    return Boolean(this.text || this.thoughts || this.calls.length);
  }

  /* Tokens per round. The first comes with the prompt, and a round may be cut short. */
  get acceptLength() {
    return this.round ? (this.tokens.length - 1) / this.round : NaN;
  }

  get elapsed() {
    return (this.lastAt ?? seconds()) - this.started;
  }

  get rate() {
    return this.tokens.length > this.inFirst ? (this.tokens.length - this.inFirst) / (this.lastAt - this.firstAt) : NaN;
  }

  /* Whether drafts might have been made, and most tokens came without any. */
  get rested() {
    return this.tokens.length > 1 && 2 * this.counts.plain > this.tokens.length;
  }

  /* Whether drafts might have been made and none was. */
  get undrafted() {
    return this.tokens.length > 1 && this.counts.plain === this.tokens.length;
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.speculation = chunk.metrics?.speculative_decoding ?? this.speculation;
    const choice = chunk.choices[0];
    if (choice) {
      this.add(choice.token_sources ?? [], choice.logprobs?.content ?? []);
      if (choice.delta.reasoning_content) this.show(choice.delta.reasoning_content, this.thinking());
      if (choice.delta.content) {
        if (this.thoughts && !this.text) this.thoughts.node.parentNode.open = false;
        this.show(choice.delta.content, this.answer);
      }
      for (const call of choice.delta.tool_calls ?? []) this.call(call);
      this.finish = choice.finish_reason ?? this.finish;
    }
    this.draw();
  }

  add(sources, logprobs) {
    sources.forEach(([text, source], i) => {
      const known = logprobs[i];
      if (this.tokens.length && this.place === 0) this.round += 1;
      this.place += 1;
      const token = { text, source, round: this.round, place: this.place };
      if (source !== "accepted") this.place = 0; // the round ends
      if (known) {
        token.name = known.token;
        token.logprob = round4(known.logprob);
        token.top = known.top_logprobs.map((each) => [each.token, round4(each.logprob)]);
      }
      this.tokens.push(token);
      this.ahead.push([text, token]);
      this.counts[source] += 1;
    });
    if (sources.length) this.lastAt = seconds();
    if (this.firstAt === null && this.lastAt !== null) {
      this.firstAt = this.lastAt;
      this.inFirst = this.tokens.length;
    }
  }

  thinking() {
    if (!this.thoughts) {
      this.thoughts = new Passage("text");
      this.thoughts.node.setAttribute("aria-label", "Thoughts; arrow keys step through their tokens");
      const details = element("details", "thinking");
      details.open = true;
      details.append(element("summary", "", "Thinking"), this.thoughts.node);
      this.host.prepend(details);
    }
    return this.thoughts;
  }

  call({ index, id, function: { name, arguments: more } }) {
    const call = (this.calls[index] ??= { id, type: "function", function: { name, arguments: "" } });
    call.function.arguments += more ?? "";
  }

  show(text, passage) {
    const at = this.ahead.map(([rest]) => rest).join("").indexOf(text);
    if (at < 0) return passage.push(text, null);
    this.advance(at, null);
    this.advance(text.length, passage);
  }

  advance(count, passage) {
    while (count > 0) {
      const [rest, token] = this.ahead[0];
      const piece = rest.slice(0, count);
      passage?.push(piece, token);
      count -= piece.length;
      if (piece.length === rest.length) this.ahead.shift();
      else this.ahead[0][0] = rest.slice(piece.length);
    }
  }

  draw() {
    this.answer.draw(false);
    this.thoughts?.draw(false);
    this.called.replaceChildren(
      ...this.calls.map((call) => {
        const card = element("div", "call");
        card.append(element("b", "", call.function.name), element("pre", "", pretty(call.function.arguments)));
        return card;
      }),
    );
    const { acceptLength, rate, speculation, tokens } = this;
    const rejected = speculation ? speculation.num_draft_tokens - speculation.num_accepted_draft_tokens : 0;
    const figures = [
      [acceptLength.toFixed(2), "tokens a round", Number.isFinite(acceptLength) && !this.undrafted],
      [rejected, `of ${speculation?.num_draft_tokens} drafts rejected`, speculation],
      [rate.toFixed(1), "tok/s", Number.isFinite(rate)],
      [tokens.length, tokens.length === 1 ? "token" : "tokens", tokens.length],
      [`${(this.firstAt - this.started).toFixed(2)} s`, "to the first", this.firstAt !== null],
    ];
    this.figures.replaceChildren(
      ...figures.filter(([, , known]) => known).map(([value, unit]) => {
        const figure = element("span");
        figure.append(element("b", "", value), ` ${unit}`);
        return figure;
      }),
    );
    if (this.finish === "length") this.figures.append(element("span", "", "cut at the limit"));
    if (this.stopped) this.figures.append(element("span", "", "stopped"));
    this.shares.hidden = !tokens.length;
    for (const bar of this.shares.children) {
      const count = this.counts[bar.className];
      share(bar, count / tokens.length);
      bar.title = `${count} ${bar.className}`;
    }
  }

  /* How many drafts each round had, where all had as many. */
  get drafts() {
    const { num_spec_steps: rounds, num_spec_tokens: most, num_draft_tokens: all } = this.speculation ?? {};
    return rounds && all === rounds * most ? most : null;
  }

  end(error) {
    this.host.classList.remove("writing");
    this.stopped = error?.name === "AbortError";
    this.redraw();
    this.draw();
    if (error && !this.stopped) {
      const told = element("p", "error", error.message);
      told.setAttribute("role", "alert");
      this.host.append(told);
    }
  }

  redraw() {
    this.answer.draw();
    this.thoughts?.draw();
  }

  /* Runs a request to its end. Returns the error that ended it, or null; a stop is an AbortError. */
  async run(body, signal, drawn = () => {}) {
    this.host.classList.add("writing");
    this.started = seconds();
    let failed = null;
    try {
      for await (const chunk of chunks(body, signal)) {
        this.take(chunk);
        drawn(this);
      }
    } catch (error) {
      failed = error;
    }
    this.end(failed);
    return failed;
  }

  /* The reply as a message of a conversation; `shown` is what the page alone needs to show it again. */
  message() {
    const places = new Map(this.tokens.map((token, i) => [token, i]));
    const packed = (passage) => passage?.pieces.map(([text, token]) => [text, places.get(token) ?? -1]);
    const { tokens, counts, round, inFirst, finish, usage, speculation, stopped } = this;
    const times = { started: 0, firstAt: this.firstAt - this.started, lastAt: this.lastAt - this.started };
    const shown = { tokens, counts, round, inFirst, finish, usage, speculation, stopped, ...times };
    return {
      role: "assistant",
      content: this.text,
      ...(this.thoughts && { reasoning_content: this.thoughts.text }),
      ...(this.calls.length && { tool_calls: this.calls }),
      shown: { ...shown, answer: packed(this.answer), thoughts: packed(this.thoughts) },
    };
  }

  /* Shows a message that `message` made. */
  static of(message, host) {
    const reply = new Reply(host);
    const { answer, thoughts, ...rest } = message.shown;
    Object.assign(reply, rest, { calls: message.tool_calls ?? [] });
    const unpack = (pieces, passage) => pieces.forEach(([text, i]) => passage.push(text, rest.tokens[i] ?? null));
    unpack(answer, reply.answer);
    if (thoughts) {
      unpack(thoughts, reply.thinking());
      reply.thoughts.node.parentNode.open = false;
    }
    reply.redraw();
    reply.draw();
    return reply;
  }
}

const round4 = (number) => Math.round(number * 1e4) / 1e4;

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not whole yet, or cut
  }
}
