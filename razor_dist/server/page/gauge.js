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

const MOST = "razor_dist most";

export class Gauge {
  /** The figures go to `place`, what they come to into `summary`; `from` says from where it saves. */
  constructor(place, summary, from) {
    Object.assign(this, { place, summary, from });
    // What was kept when it was most, since the tab was opened.
    this.most = JSON.parse(sessionStorage.getItem(MOST) ?? "null");
    if (this.most) this.show({});
  }

  show(stats) {
    const found = kept(stats);
    if (found && (!this.most || found.now >= this.most.now)) {
      this.most = found;
      sessionStorage.setItem(MOST, JSON.stringify(this.most));
    }
    const saves = this.most && this.most.full > this.most.now;
    if (saves) this.summary.textContent = `${(this.most.full / this.most.now).toFixed(1)} times less memory`;
    if ("world_size" in stats) this.from.textContent = fromWords(stats);
    const parts = saves ? [memory(this.most)] : [];
    const sent = sum(Object.values(stats.bytes_sent ?? {}));
    if (sent) parts.push(sentBetween(stats, sent));
    if (parts.length) this.place.replaceChildren(...parts);
  }
}

/** From how long a context on there is something to save. */
function fromWords({ saves_from_tokens: from, retrieval_fraction }) {
  const heads = `${Math.round(100 * (retrieval_fraction ?? 0))} % of the model's heads keep the whole prompt`;
  if (!from) return `${heads}; nothing is saved with these windows on these ranks.`;
  return `${heads}, which saves memory from about ${count(from)} tokens on.`;
}

function memory({ now, full }) {
  const list = document.createElement("dl");
  row(list, "Keys and values kept", bytes(now), now / full);
  row(list, "Full attention would keep", `about ${bytes(full)}`, 1);
  return list;
}

function sentBetween(stats, total) {
  const folded = document.createElement("details");
  const words = document.createElement("summary");
  words.textContent = `Sent between ${count(stats.world_size)} ranks since the server began: ${bytes(total)}`;
  const list = document.createElement("dl");
  const purposes = Object.entries(stats.bytes_sent).filter(([, sent]) => sent > 0);
  for (const [purpose, sent] of purposes.sort((a, b) => b[1] - a[1])) row(list, purpose, bytes(sent));
  folded.append(words, list);
  return folded;
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
