// The conversation of a tab, kept in the browser so that a reload loses nothing.

const NAME = "razor_dist";
const TAB = "razor_dist tab";
// Milliseconds after which what a closed tab has left is removed.
const KEPT = 24 * 3600 * 1000;

function tab() {
  let id = sessionStorage.getItem(TAB);
  if (!id) sessionStorage.setItem(TAB, (id = `${Date.now()}-${Math.random()}`));
  return id;
}

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

/** Returns what this tab has saved, if anything; removes what old tabs have. */
export async function load() {
  try {
    const tabs = await table("readwrite");
    const mine = await done(tabs.get(tab()));
    for (const id of await done(tabs.getAllKeys())) {
      const saved = (await done(tabs.get(id)))?.time ?? 0;
      if (id !== tab() && Date.now() - saved > KEPT) tabs.delete(id);
    }
    return mine?.conversation;
  } catch {
    return undefined; // a browser may forbid it
  }
}

export async function save(conversation) {
  try {
    const tabs = await table("readwrite");
    await done(tabs.put({ time: Date.now(), conversation: { ...conversation } }, tab()));
  } catch {
    // A reload will begin anew.
  }
}
