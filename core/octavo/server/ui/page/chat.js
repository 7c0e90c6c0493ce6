// The conversation: answers stream, can be stopped, and can be asked again, to see what the cache saves.

import { ask } from "./ask.js";
import { element, milliseconds, number } from "./picture.js";
import { OPENERS, PERSONAS } from "./texts.js";

const find = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.canChat = true;
    this.turns = [];
    this.running = null;
    this.log = find("log");
    this.question = find("question");
    for (const name of Object.keys(PERSONAS)) find("persona").append(new Option(name));
    for (const text of OPENERS) this.opener(text);
    this.persona();
    find("persona").addEventListener("change", () => this.persona());
    find("new-chat").addEventListener("click", () => this.clear());
    find("stop").addEventListener("click", () => this.stop());
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.question.value.trim());
    });
    this.question.addEventListener("input", () => this.fit());
    this.question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      find("composer").requestSubmit();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
  }

  opener(text) {
    const button = element("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => this.send(text));
    const item = element("li");
    item.append(button);
    find("openers").append(item);
  }

  persona() {
    find("system").value = PERSONAS[find("persona").value];
  }

  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight + 2}px`;
  }

  clear() {
    this.stop();
    for (const turn of this.turns) turn.box.remove();
    this.turns = [];
    find("hello").hidden = false;
    this.question.focus();
  }

  stop() {
    this.running?.abort();
  }

  send(text) {
    if (!text || this.running) return;
    find("hello").hidden = true;
    this.question.value = "";
    this.fit();
    const turn = { asked: text, answer: "", box: element("div", "turn"), attempts: element("ol", "attempts") };
    turn.text = element("div", "answer");
    turn.again = element("button", "plain", "Ask again");
    turn.again.type = "button";
    turn.again.addEventListener("click", () => this.answer(turn));
    turn.box.append(element("div", "asked", text), turn.text, turn.attempts, turn.again);
    this.log.append(turn.box);
    this.turns.push(turn);
    this.answer(turn);
  }

  messages(turn) {
    const system = find("system").value.trim();
    const before = this.turns.slice(0, this.turns.indexOf(turn));
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap((one) => [
        { role: "user", content: one.asked },
        { role: "assistant", content: one.answer },
      ]),
      { role: "user", content: turn.asked },
    ];
  }

  async answer(turn) {
    if (this.running) return;
    this.running = new AbortController();
    this.busy(turn, true);
    const body = {
      messages: this.messages(turn),
      temperature: Number(find("temperature").value) || 0,
      max_tokens: Number(find("most").value) || 200,
    };
    const told = {};
    let problem = "";
    turn.answer = turn.text.textContent = "";
    try {
      for await (const piece of ask(body, this.canChat, this.running.signal, told)) {
        const follow = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
        turn.answer += piece;
        turn.text.append(piece);
        if (follow) this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      problem = this.running.signal.aborted ? "stopped" : error.message;
    }
    turn.attempts.append(attempt(told, problem));
    this.running = null;
    this.busy(turn, false);
    this.log.scrollTop = this.log.scrollHeight;
  }

  busy(turn, busy) {
    turn.text.classList.toggle("busy", busy);
    this.log.setAttribute("aria-busy", busy); // the answer is read out when it is whole
    find("send").hidden = busy;
    find("stop").hidden = !busy;
    for (const one of this.turns) one.again.hidden = busy;
    if (!busy) this.question.focus({ preventScroll: true });
  }
}

// What an answer cost, as a line.
function attempt({ usage, first, last, wait }, problem) {
  const line = element("li");
  const say = (strong, rest) => {
    const part = element("span");
    part.append(element("b", "", strong), rest);
    line.append(part);
  };
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    const bar = element("span", "progress");
    const full = element("span", "cached");
    full.style.width = `${(100 * cached) / usage.prompt_tokens}%`;
    bar.append(full);
    line.append(bar);
    say(`${number(cached)}/${number(usage.prompt_tokens)}`, " cached");
  }
  if (wait !== undefined) say(milliseconds(wait), " to first token");
  if (usage?.completion_tokens > 1 && last > first) {
    say(number((1000 * (usage.completion_tokens - 1)) / (last - first)), " tok/s");
  }
  if (problem) line.append(element("span", problem === "stopped" ? "" : "wrong", problem));
  return line;
}
