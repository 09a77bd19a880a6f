// What the split into retrieval and streaming heads saves, by the server's counters.

import { bytes, count } from "./format.js";

const sum = (numbers) => (numbers ?? []).reduce((total, number) => total + number, 0);

/**
 * {now, full}: bytes of keys and values that are kept, and that full attention would keep for the
 * same tokens; null if none are. Retrieval heads keep all, and they are a known share of the heads.
 */
export function kept(stats) {
  const retrieval = sum(stats.retrieval_kv_bytes_per_rank);
  if (!retrieval || !stats.retrieval_fraction) return null;
  return { now: sum(stats.kv_bytes_per_rank), full: retrieval / stats.retrieval_fraction };
}

export class Gauge {
  constructor(place) {
    this.place = place;
    this.most = null; // what was kept when it was most, since the page was opened
  }

  show(stats) {
    const found = kept(stats);
    if (found && (!this.most || found.now >= this.most.now)) this.most = found;
    const parts = [];
    if (this.most) parts.push(this.memory(this.most, stats));
    const sent = sum(Object.values(stats.bytes_sent ?? {}));
    if (sent) parts.push(sentBetween(stats, sent));
    if (parts.length) this.place.replaceChildren(...parts);
  }

  memory({ now, full }, stats) {
    const list = document.createElement("dl");
    row(list, "Keys and values kept", bytes(now), now / Math.max(now, full));
    row(list, "Full attention would keep", `about ${bytes(full)}`, full / Math.max(now, full));
    const words = document.createElement("p");
    const heads = `${Math.round(100 * stats.retrieval_fraction)} % of the heads keep everything`;
    words.textContent =
      full > now
        ? `${(full / now).toFixed(1)} times less memory: ${heads}.`
        : `No less memory yet: ${heads}, and the windows of the others, one on each rank, are together no shorter than the context.`;
    return group(words, list);
  }
}

function sentBetween(stats, total) {
  const words = document.createElement("p");
  words.textContent = `Sent between ${count(stats.world_size)} ranks since the server began:`;
  const list = document.createElement("dl");
  const purposes = Object.entries(stats.bytes_sent).filter(([, sent]) => sent > 0);
  for (const [purpose, sent] of purposes.sort((a, b) => b[1] - a[1])) row(list, purpose, bytes(sent));
  if (purposes.length > 1) row(list, "together", bytes(total));
  return group(words, list);
}

function row(list, name, value, share) {
  const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
  [term.textContent, detail.textContent] = [name, value];
  list.append(term, detail);
  if (share === undefined) return;
  const bar = document.createElement("dd");
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  const filled = document.createElement("span");
  filled.style.width = `${100 * share}%`;
  bar.append(filled);
  list.append(bar);
}

function group(...elements) {
  const div = document.createElement("div");
  div.append(...elements);
  return div;
}
