// Numbers that change, each with the last minute of it as a line.

import { element } from "./picture.js";

const POINTS = 240;
const SVG = "http://www.w3.org/2000/svg";

class Tile {
  constructor(list, label, unit, digits = 0) {
    this.digits = digits;
    this.values = [];
    const tile = element("div");
    this.value = document.createTextNode("–");
    const number = element("dd");
    number.append(this.value, " ", element("small", "", unit));
    const chart = document.createElementNS(SVG, "svg");
    chart.setAttribute("viewBox", `0 0 ${POINTS} 100`);
    chart.setAttribute("preserveAspectRatio", "none");
    [this.area, this.line] = ["area", "line"].map((name) => {
      const shape = document.createElementNS(SVG, "polyline");
      shape.setAttribute("class", name);
      chart.append(shape);
      return shape;
    });
    const holder = element("dd", "chart");
    holder.setAttribute("aria-hidden", "true");
    holder.append(chart);
    tile.append(element("dt", "", label), number, holder);
    list.append(tile);
  }

  add(value, most = 0) {
    this.values.push(value);
    if (this.values.length > POINTS) this.values.shift();
    this.value.data = value.toLocaleString("en", { minimumFractionDigits: this.digits, maximumFractionDigits: this.digits });
    const highest = Math.max(most, ...this.values) || 1;
    const start = POINTS - this.values.length;
    const points = this.values.map((one, at) => `${start + at + 1},${(96 - (92 * one) / highest).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${start + 1},100 ${points.join(" ")} ${POINTS},100`);
  }
}

export class Tiles {
  constructor(list) {
    this.generated = new Tile(list, "Generated", "tokens/s");
    this.prompt = new Tile(list, "Prompts computed", "tokens/s");
    this.step = new Tile(list, "Step", "ms", 1);
    this.hits = new Tile(list, "Prompt tokens from the cache", "%");
    this.before = null;
  }

  // Counters since the engine's start, at a time in seconds.
  show(stats, time) {
    const { before } = this;
    this.before = { stats, time };
    if (before === null || before.stats.steps > stats.steps || before.time >= time) return;
    const grown = (name) => stats[name] - before.stats[name];
    const seconds = time - before.time;
    this.generated.add(grown("decode_tokens") / seconds);
    this.prompt.add(grown("prefill_tokens") / seconds);
    this.step.add(grown("steps") ? (1000 * grown("step_seconds")) / grown("steps") : 0);
    this.hits.add(stats.queried_tokens ? (100 * stats.hit_tokens) / stats.queried_tokens : 0, 100);
  }
}
