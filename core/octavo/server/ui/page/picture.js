// What the server sends of the cache, made ready for the views.

const UNIT = 1000;

export class Picture {
  constructor(state) {
    const { cache } = state;
    this.blockSize = state.block_size;
    this.stats = cache.stats;
    this.names = cache.states;
    this.nodes = cache.nodes;
    this.requests = cache.requests;
    this.others = cache.others;
    this.nodesLeftOut = cache.nodes_left_out;
    const total = cache.stats.blocks_total;
    this.states = new Uint8Array(total);
    this.owners = new Int32Array(total);
    this.idle = new Float32Array(total);
    this.counts = Object.fromEntries(this.names.map((name) => [name, 0]));
    const first = new Int32Array(this.nodes.length).fill(-1);
    let at = 0;
    for (const [count, stateOf, owner, idle] of cache.runs) {
      this.states.fill(stateOf, at, at + count);
      this.owners.fill(owner, at, at + count);
      this.idle.fill(idle, at, at + count);
      this.counts[this.names[stateOf]] += count;
      if (owner >= 0 && first[owner] < 0) first[owner] = at;
      at += count;
    }
    this.nodes.forEach((node, place) => {
      node.place = place;
      node.key = `node ${first[place]}`; // places change from one picture to the next, a node's first block hardly ever
      node.depth = node.parent < 0 ? 0 : this.nodes[node.parent].depth + 1;
    });
    this.requests.forEach((request, place) => {
      request.place = place;
      request.key = `request ${request.id}`;
    });
  }

  // The nodes from the top of the tree down to this one.
  path(place) {
    const nodes = [];
    for (let at = place; at >= 0; at = this.nodes[at].parent) nodes.unshift(this.nodes[at]);
    return nodes;
  }

  // Owners whose blocks light up for a node or a request: 2 its own ones, 1 those of the prefix above.
  glow(key) {
    const found = this.nodes.find((one) => one.key === key) ?? this.requests.find((one) => one.key === key);
    if (!found) return null;
    const isRequest = "most_tokens" in found;
    const levels = new Map();
    for (const node of this.path(isRequest ? found.node : found.parent)) levels.set(node.place, 1);
    levels.set(isRequest ? -2 - found.place : found.place, 2);
    return levels;
  }

  // Who has a block, for `glow`.
  keyOf(block) {
    const owner = this.owners[block];
    if (owner >= 0) return this.nodes[owner].key;
    return owner < -1 ? this.requests[-2 - owner].key : null;
  }
}

// 0 just used, 1 long ago: ages differ by orders of magnitude.
export const age = (seconds) => Math.min(1, Math.log1p(seconds) / Math.log1p(900));

export const number = (value) => Math.round(value).toLocaleString("en");

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export const milliseconds = (value) => (value < UNIT ? `${Math.round(value)} ms` : `${(value / UNIT).toFixed(1)} s`);

// Text in one line, in which line breaks and tabs can be seen.
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
