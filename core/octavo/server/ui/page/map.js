// The block map: a cell for each block. A pixel a block is painted and enlarged, so that a hundred thousand cost no more
// than a hundred; a pattern of gaps is laid over it where cells are large enough to have any.

import { light } from "./light.js";
import { age, duration, element, number, visible } from "./picture.js";

const LARGEST = 44; // CSS pixels of a cell
const AGES = 32; // shades of a cached block
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockMap {
  constructor(canvas, tip, caption, legend) {
    Object.assign(this, { canvas, tip, caption, legend });
    this.context = canvas.getContext("2d");
    this.cells = document.createElement("canvas");
    this.picture = null;
    this.cursor = -1;
    this.colors();
    new ResizeObserver(() => this.layout()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.colors();
      this.layout();
    });
    light.addEventListener("change", () => this.aim());
    canvas.addEventListener("pointermove", (event) => this.point(this.blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("blur", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  colors() {
    const style = getComputedStyle(document.documentElement);
    const rgb = (name) => {
      const hex = style.getPropertyValue(name).trim().slice(1);
      return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
    };
    this.palette = Object.fromEntries(["free", "cached", "pinned", "held", "panel", "flash"].map((name) => [name, rgb(`--${name}`)]));
    const old = rgb("--cached-old");
    this.shades = Array.from({ length: AGES }, (_, at) => mix(this.palette.cached, old, at / (AGES - 1)));
    this.ground = style.getPropertyValue("--panel");
    this.ring = style.getPropertyValue("--text");
  }

  show(picture) {
    const before = this.picture;
    this.picture = picture;
    const total = picture.states.length;
    if (before?.states.length !== total) {
      this.now = new Float32Array(3 * total);
      this.target = new Float32Array(3 * total);
      this.layout();
    } else if (!calm.matches) {
      this.flash(before, picture);
    }
    this.legend.forEach((name, item) => (item.textContent = number(picture.counts[name])));
    this.aim();
    if (this.cursor >= 0) this.tell();
  }

  // A block that was just taken, or came into use again, lights up for a moment.
  flash(before, picture) {
    const busy = new Set(["pinned", "held"].map((name) => picture.names.indexOf(name)));
    for (let block = 0; block < picture.states.length; block++) {
      if (busy.has(picture.states[block]) && !busy.has(before.states[block])) this.now.set(this.palette.flash, 3 * block);
    }
  }

  layout() {
    if (!this.picture) return;
    const ratio = devicePixelRatio;
    const width = (this.canvas.width = Math.max(1, Math.round(this.canvas.clientWidth * ratio)));
    const height = (this.canvas.height = Math.max(1, Math.round(this.canvas.clientHeight * ratio)));
    const total = this.picture.states.length;
    Object.assign(this, grid(total, width, height, Math.round(LARGEST * ratio), 4 * ratio));
    this.cells.width = this.columns;
    this.cells.height = this.rows;
    this.image = new ImageData(this.columns, this.rows);
    this.gaps = this.size >= 4 * ratio ? this.gapPattern(ratio) : null;
    this.aim();
    this.now.set(this.target);
    this.paint();
  }

  gapPattern(ratio) {
    const gap = this.size >= 9 * ratio ? Math.round(1.5 * ratio) : 1;
    const tile = document.createElement("canvas");
    tile.width = tile.height = this.size;
    const context = tile.getContext("2d");
    context.fillStyle = this.ground;
    context.fillRect(0, 0, this.size, this.size);
    context.globalCompositeOperation = "destination-out";
    context.beginPath();
    context.roundRect(0, 0, this.size - gap, this.size - gap, this.size > 8 * ratio ? this.size * 0.16 : 0);
    context.fill();
    return this.context.createPattern(tile, "repeat");
  }

  // Which color each block goes to, and what the caption says.
  aim() {
    if (!this.picture) return;
    const { states, idle, owners, names, stats, blockSize } = this.picture;
    const glow = light.key === null ? null : this.picture.glow(light.key);
    const plain = names.map((name) => this.palette[name] ?? this.palette.free);
    const cached = names.indexOf("cached");
    const lit = [0, 0, 0];
    for (let block = 0; block < states.length; block++) {
      let color = states[block] === cached ? this.shades[Math.round(age(idle[block]) * (AGES - 1))] : plain[states[block]];
      if (glow) {
        const level = glow.get(owners[block]) ?? 0;
        lit[level]++;
        if (level === 0) color = mix(color, this.palette.panel, 0.82);
        else if (states[block] === cached) color = level === 2 ? this.palette.cached : this.shades[AGES >> 1];
        else if (level === 1) color = mix(color, this.palette.panel, 0.35);
      }
      this.target.set(color, 3 * block);
    }
    this.caption.textContent = glow
      ? `${number(lit[2])} of its own` + (lit[1] ? `, ${number(lit[1])} of the prefix above` : "")
      : `${number(stats.blocks_total)} blocks of ${blockSize} tokens`;
    this.start();
  }

  start() {
    if (this.frame === undefined) this.frame = requestAnimationFrame((time) => this.tick(time, time));
  }

  tick(time, before) {
    this.frame = undefined;
    const share = calm.matches ? 1 : 1 - Math.exp(-Math.max(8, time - before) / 130);
    let most = 0;
    for (let at = 0; at < this.now.length; at++) {
      const gap = this.target[at] - this.now[at];
      this.now[at] += gap * share;
      most = Math.max(most, Math.abs(gap));
    }
    this.paint();
    if (most > 1) this.frame = requestAnimationFrame((next) => this.tick(next, time));
  }

  paint() {
    if (!this.image) return;
    const { data } = this.image;
    for (let block = 0; block < this.picture.states.length; block++) {
      for (let part = 0; part < 3; part++) data[4 * block + part] = this.now[3 * block + part];
      data[4 * block + 3] = 255;
    }
    this.cells.getContext("2d").putImageData(this.image, 0, 0);
    const { context, columns, rows, size } = this;
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cells, 0, 0, columns * size, rows * size);
    if (this.gaps) {
      context.fillStyle = this.gaps;
      context.fillRect(0, 0, columns * size, rows * size);
    }
    if (this.cursor >= 0) {
      context.strokeStyle = this.ring;
      context.lineWidth = Math.max(2, size / 12);
      context.strokeRect((this.cursor % columns) * size + 1, Math.floor(this.cursor / columns) * size + 1, size - 3, size - 3);
    }
  }

  blockAt(event) {
    const ratio = devicePixelRatio / this.size;
    const column = Math.floor(event.offsetX * ratio);
    const block = Math.floor(event.offsetY * ratio) * this.columns + column;
    return column < this.columns && block < (this.picture?.states.length ?? 0) ? block : -1;
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns };
    if (event.key === "Escape") this.point(-1);
    if (!(event.key in steps) || !this.picture) return;
    event.preventDefault();
    const next = this.cursor < 0 ? 0 : this.cursor + steps[event.key];
    if (next >= 0 && next < this.picture.states.length) this.point(next);
  }

  point(block) {
    this.cursor = block;
    light.show(block < 0 ? null : this.picture.keyOf(block));
    this.tell();
    this.start();
  }

  tell() {
    this.tip.hidden = this.cursor < 0;
    if (this.tip.hidden) return;
    const { picture, cursor: block } = this;
    const state = picture.names[picture.states[block]];
    const owner = picture.owners[block];
    const used = state === "cached" ? `, idle ${duration(picture.idle[block])}` : "";
    this.tip.replaceChildren(element("b", "", `Block ${number(block + 1)}`), ` ${state}${used}`);
    if (owner >= 0) {
      for (const node of picture.path(owner).slice(-3)) this.tip.append(element("q", "", visible(node.text)));
    } else if (owner < -1) {
      const request = picture.requests[-2 - owner];
      this.tip.append(` by request ${request.id}`, element("q", "", `… ${visible(request.text)}`));
    } else if (state !== "free") this.tip.append(", of another key or not shown");
    this.place(block);
  }

  place(block) {
    const scale = this.size / devicePixelRatio;
    const sheet = this.canvas.parentElement;
    const x = sheet.offsetLeft + ((block % this.columns) + 1) * scale + 8;
    const y = sheet.offsetTop + (Math.floor(block / this.columns) + 1) * scale + 8;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const { clientWidth, clientHeight } = this.tip.parentElement;
    this.tip.style.left = `${x + width > clientWidth ? Math.max(0, x - width - scale - 16) : x}px`;
    this.tip.style.top = `${y + height > clientHeight ? Math.max(0, y - height - scale - 16) : y}px`;
  }
}

// The largest cells with which all blocks fit: of whole pixels, unless that would be less than `smallest` of them.
function grid(total, width, height, largest, smallest) {
  for (let size = largest; size >= smallest; size--) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(total / columns);
    if (rows * size <= height) return { size, columns, rows };
  }
  for (let columns = Math.max(1, Math.ceil(Math.sqrt((total * width) / height))); ; columns++) {
    const rows = Math.ceil(total / columns);
    if ((rows * width) / columns <= height) return { size: width / columns, columns, rows };
  }
}

function mix(from, to, share) {
  return from.map((part, at) => part + (to[at] - part) * share);
}
