// Asks the server how things stand a few times a second while somebody looks, and hands it to the views.

import { at } from "./ask.js";
import { Chat } from "./chat.js";
import { Crowd } from "./crowd.js";
import { BlockMap } from "./map.js";
import { Picture, element } from "./picture.js";
import { Tiles } from "./tiles.js";
import { Batch, PrefixTree } from "./tree.js";

const SOON = 250; // milliseconds
const LATE = 4000;
const find = (id) => document.getElementById(id);

const MEANINGS = {
  free: "Nobody's",
  cached: "In the prefix tree, unused: paler the longer it has been idle; the oldest go first",
  pinned: "In the prefix tree, and in use by requests",
  held: "One request's alone",
};

function legend() {
  const items = new Map();
  for (const [name, meaning] of Object.entries(MEANINGS)) {
    const item = element("li", name);
    const count = element("b", "", "0");
    item.title = meaning;
    item.append(element("i"), name, count);
    find("legend").append(item);
    items.set(count, name);
  }
  return items;
}

const chat = new Chat();
const crowd = new Crowd(find("crowd"), find("crowd-size"));
const tiles = new Tiles(find("tiles"));
const views = [
  new BlockMap(find("map"), find("tip"), find("caption"), legend()),
  new PrefixTree(find("tree"), find("prefixes-note")),
  new Batch(find("requests").querySelector("tbody"), find("batch-note")),
];
let shown = -1; // when the latest picture was taken
let pause = SOON;

function tell(trouble) {
  const status = find("status");
  const text = trouble || "serving";
  if (find("status-text").textContent !== text) find("status-text").textContent = text; // or it is read out again
  status.className = trouble ? "bad" : "good";
  find("look").classList.toggle("stale", Boolean(trouble));
}

function show(state) {
  const model = element("b", "", state.model.split("/").pop());
  model.title = state.model;
  find("served").replaceChildren(model, ` on ${state.backend}, octavo ${state.version}`);
  chat.canChat = crowd.canChat = state.can_chat;
  crowd.answers = Math.min(2, state.most_answers);
  tell(state.trouble);
  if (state.cache === null || state.time === shown) return;
  shown = state.time;
  tiles.show(state.cache.stats, state.time);
  const picture = new Picture(state);
  for (const view of views) view.show(picture);
}

async function look() {
  try {
    const response = await fetch(at("ui/state"), { signal: AbortSignal.timeout(10_000) });
    if (!response.ok) throw new Error(`the server answers ${response.status}`);
    show(await response.json());
    pause = SOON;
  } catch (error) {
    tell(error instanceof TypeError || error.name === "TimeoutError" ? "the server does not answer; trying again" : error.message);
    pause = Math.min(2 * pause, LATE);
  }
  if (!document.hidden) setTimeout(look, pause);
  else document.addEventListener("visibilitychange", look, { once: true });
}

look();
