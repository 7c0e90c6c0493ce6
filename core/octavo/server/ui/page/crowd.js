// Readers who ask on and on, so that there is something to see: they share a few system prompts, and each wants two answers
// to a question. There are four at most: a browser opens six connections to a server, and chat and looking need theirs.

import { ask } from "./ask.js";
import { CROWD, PERSONAS } from "./texts.js";

const MOST_TOKENS = 80;
const pick = (list) => list[Math.floor(Math.random() * list.length)];

export class Crowd {
  constructor(range, output) {
    this.readers = [];
    this.canChat = true;
    this.answers = 1;
    range.value = 0;
    range.addEventListener("input", () => {
      output.value = range.value;
      this.resize(Number(range.value));
    });
  }

  resize(size) {
    while (this.readers.length > size) this.readers.pop().abort();
    while (this.readers.length < size) {
      const reader = new AbortController();
      this.readers.push(reader);
      this.read(reader.signal);
    }
  }

  async read(signal) {
    const system = pick(Object.values(PERSONAS).filter(Boolean));
    while (!signal.aborted) {
      const messages = [{ role: "system", content: system }, { role: "user", content: pick(CROWD) }];
      try {
        for await (const _ of ask({ messages, n: this.answers, max_tokens: MOST_TOKENS, temperature: 1 }, this.canChat, signal));
      } catch {
        await new Promise((resolve) => setTimeout(resolve, 1000)); // it is full, or down
      }
      while (document.hidden && !signal.aborted) await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}
