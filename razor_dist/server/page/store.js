// The conversation of a tab, kept in the browser so that a reload loses nothing.

const NAME = "razor_dist";
const TAB = "razor_dist tab";
// Set between two pages of a tab: a duplicated tab begins with its original's sessionStorage, and without this.
const LEFT = "razor_dist left";
// Milliseconds after which what a closed tab has left is removed.
const KEPT = 24 * 3600 * 1000;

// Whose conversation this tab begins with: its own, or its original's.
const from = sessionStorage.getItem(TAB);
const tab = from && sessionStorage.getItem(LEFT) ? from : `${Date.now()}-${Math.random()}`;
sessionStorage.setItem(TAB, tab);
// Held as long as the tab is open, where the browser has locks (not over plain HTTP from afar).
navigator.locks?.request(tab, () => new Promise(() => {}));
addEventListener("pagehide", () => sessionStorage.setItem(LEFT, "true"));
addEventListener("pageshow", () => sessionStorage.removeItem(LEFT)); // also one that the browser has kept whole

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function table(mode) {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("tabs");
  return (await done(opening)).transaction("tabs", mode).objectStore("tabs");
}

/** Returns what this tab or its original has saved, if anything; removes what old tabs have. */
export async function load() {
  try {
    const open = ((await navigator.locks?.query())?.held ?? []).map(({ name }) => name);
    const tabs = await table("readwrite");
    const mine = await done(tabs.get(from ?? tab));
    for (const id of await done(tabs.getAllKeys())) {
      const saved = (await done(tabs.get(id)))?.time ?? 0;
      if (id !== tab && !open.includes(id) && Date.now() - saved > KEPT) tabs.delete(id);
    }
    return mine?.conversation;
  } catch {
    return undefined; // a browser may forbid it
  }
}

export async function save(conversation) {
  try {
    const tabs = await table("readwrite");
    await done(tabs.put({ time: Date.now(), conversation: { ...conversation } }, tab));
  } catch {
    // A reload will begin anew.
  }
}
