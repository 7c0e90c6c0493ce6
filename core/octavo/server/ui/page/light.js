// What lights up: the key of a node or a request that is pointed at, or null. Views listen for `change`.

class Light extends EventTarget {
  key = null;

  show(key) {
    if (key === this.key) return;
    this.key = key;
    this.dispatchEvent(new Event("change"));
  }
}

export const light = new Light();

// A row of a list or table that lights its blocks while the pointer or the focus is on it.
export function lights(row) {
  row.addEventListener("pointerenter", () => light.show(row.dataset.key));
  row.addEventListener("pointerleave", () => light.show(null));
  row.addEventListener("focus", () => light.show(row.dataset.key));
  row.addEventListener("blur", () => light.show(null));
}
