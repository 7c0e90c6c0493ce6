// The prefix tree, and the requests that run on it: rows that stay the same elements from one picture to the next.

import { light, lights } from "./light.js";
import { age, duration, element, number, visible } from "./picture.js";

const DEEPEST = 7; // from here on rows are indented no further

// Rows by key: those that stay are moved, not made again, so that hover, focus and transitions outlive an update.
export class Rows {
  constructor(parent, make, fill) {
    Object.assign(this, { parent, make, fill });
    this.rows = new Map();
    light.addEventListener("change", () => this.mark());
  }

  show(items) {
    const gone = new Set(this.rows.keys());
    items.forEach((item, at) => {
      let row = this.rows.get(item.key);
      if (!row) {
        row = this.make();
        row.dataset.key = item.key;
        lights(row);
        this.rows.set(item.key, row);
      }
      gone.delete(item.key);
      this.fill(row, item);
      if (this.parent.children[at] !== row) this.parent.insertBefore(row, this.parent.children[at] ?? null);
    });
    for (const key of gone) {
      this.rows.get(key).remove();
      this.rows.delete(key);
    }
    if (light.key !== null && gone.has(light.key)) light.show(null);
    this.mark();
  }

  mark() {
    for (const [key, row] of this.rows) row.classList.toggle("lit", key === light.key);
  }
}

export class PrefixTree {
  constructor(list, note) {
    Object.assign(this, { list, note });
    this.rows = new Rows(list, makeNode, fillNode);
    this.empty = element("li", "empty", "Empty: nothing has been computed that others could share.");
    list.addEventListener("keydown", (event) => this.key(event));
  }

  show(picture) {
    const order = this.inOrder(picture.nodes);
    this.empty.remove();
    this.rows.show(order);
    if (!order.length) this.list.append(this.empty);
    else if (!this.list.querySelector('[tabindex="0"]')) this.list.firstElementChild.tabIndex = 0;
    const hidden = picture.nodesLeftOut + picture.others.nodes;
    const cached = picture.nodes.reduce((sum, node) => sum + node.tokens, 0);
    this.note.textContent = `${number(cached)} tokens` + (hidden ? `, ${number(hidden)} nodes not shown` : "");
  }

  // The nodes as they stand below each other: what was used last comes first, unless somebody points at a row.
  inOrder(nodes) {
    const children = Map.groupBy(nodes, (node) => node.parent);
    if (this.list.matches(":hover, :focus-within")) {
      const rank = new Map([...this.list.children].map((row, at) => [row.dataset.key, at]));
      const place = (node) => rank.get(node.key) ?? Infinity;
      for (const siblings of children.values()) siblings.sort((one, other) => place(one) - place(other) || 0);
    }
    const order = [];
    const visit = (place) => {
      const siblings = children.get(place) ?? [];
      for (const node of siblings) {
        node.words = distinct(node, siblings);
        order.push(node);
        visit(node.place);
      }
    };
    visit(-1);
    return order;
  }

  // One row is in the order of the Tab key, arrows go on from there.
  key(event) {
    const row = document.activeElement;
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (!next || row.parentElement !== this.list) return;
    event.preventDefault();
    row.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function makeNode() {
  const row = element("li");
  row.setAttribute("role", "treeitem");
  row.tabIndex = -1;
  row.append(...["mark", "words", "bar", "size", "use"].map((name) => element("span", name)));
  return row;
}

// A node's text from where it leaves its siblings: they may begin alike within a block.
function distinct(node, siblings) {
  let common = 0;
  for (const other of siblings) {
    if (other === node) continue;
    let at = 0;
    while (at < node.text.length && node.text[at] === other.text[at]) at++;
    common = Math.max(common, at);
  }
  return common && common < node.text.length ? `…${node.text.slice(common)}` : node.text;
}

function fillNode(row, node) {
  const [mark, words, bar, size, use] = row.children;
  row.style.setProperty("--depth", Math.min(node.depth, DEEPEST));
  row.setAttribute("aria-level", node.depth + 1);
  const old = Math.round(age(node.idle_seconds) * 100);
  bar.style.width = `${Math.min(64, 3 + 8 * Math.log2(node.blocks))}px`;
  mark.style.background = bar.style.background = node.locks ? "var(--pinned)" : `color-mix(in srgb, var(--cached-old) ${old}%, var(--cached))`;
  words.textContent = visible(node.words);
  words.title = node.text;
  size.textContent = `${number(node.blocks)} ${node.blocks === 1 ? "block" : "blocks"}`;
  use.textContent = node.locks ? `in use${node.locks > 1 ? ` ×${node.locks}` : ""}` : `idle ${duration(node.idle_seconds)}`;
  use.classList.toggle("now", node.locks > 0);
}

export class Batch {
  constructor(body, note) {
    this.note = note;
    this.rows = new Rows(body, makeRequest, fillRequest);
  }

  show(picture) {
    this.rows.show(picture.requests);
    const { running, waiting } = picture.stats;
    const others = picture.others.requests;
    this.note.textContent = `${running} running, ${waiting} waiting` + (others ? `, ${others} of other keys` : "");
  }
}

function makeRequest() {
  const row = element("tr");
  const progress = element("div", "progress");
  progress.append(element("span", "cached"), element("span", "prompt"), element("span", "generated"));
  for (let at = 0; at < 6; at++) row.append(element("td"));
  row.children[1].append(element("div", "words"), progress);
  return row;
}

function fillRequest(row, request) {
  const cells = row.children;
  const generated = request.tokens - request.prompt_tokens;
  const computed = Math.max(0, Math.min(request.computed_tokens, request.prompt_tokens) - request.cached_tokens);
  row.classList.toggle("waiting", !request.running);
  const [words, progress] = cells[1].children;
  cells[0].textContent = request.id;
  words.replaceChildren(element("span", "", visible(request.text)));
  const parts = request.running ? [request.cached_tokens, computed, generated] : [0, 0, 0];
  parts.forEach((tokens, at) => {
    progress.children[at].style.width = `${(100 * tokens) / request.most_tokens}%`;
  });
  cells[2].textContent = number(request.prompt_tokens);
  cells[3].textContent = request.running ? number(request.cached_tokens) : "";
  cells[4].textContent = request.running ? number(generated) : "waits";
  cells[5].textContent = request.running ? number(request.blocks) : duration(request.seconds);
}
