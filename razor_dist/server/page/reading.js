// How far a prompt has been read: a bar, the rate, the time left.

import { count, duration, plural } from "./format.js";

// Chunks over which the rate is measured: later chunks attend to more, and take longer.
const CHUNKS = 4;

export class Reading {
  /** `place` is an empty element; `announce` says a sentence to who cannot see it. */
  constructor(place, announce) {
    this.place = place;
    this.announce = announce;
    this.events = [];
    this.told = 0;
    this.began = performance.now();
    this.bar = document.createElement("progress");
    this.bar.setAttribute("aria-label", "Reading");
    this.words = document.createElement("p");
    place.replaceChildren(this.bar, this.words);
    place.hidden = false;
    this.say("Sent; waiting for the server.");
    this.timer = setInterval(() => this.show(), 1000);
  }

  say(words) {
    this.words.textContent = words;
  }

  /** Takes llama.cpp's `prompt_progress`. */
  update({ total, cache, processed, time_ms }) {
    this.events.push({ total, cache, processed, seconds: time_ms / 1000, at: performance.now() });
    this.show();
    const tenth = Math.floor((10 * processed) / total);
    if (tenth > this.told && tenth < 10) this.announce(`${10 * tenth} percent read`);
    this.told = Math.max(this.told, tenth);
  }

  get rate() {
    const last = this.events.at(-1);
    const first = this.events.at(-1 - CHUNKS) ?? this.events[0];
    return (last.processed - first.processed) / (last.seconds - first.seconds);
  }

  show() {
    const last = this.events.at(-1);
    if (!last) return;
    const known = this.rate > 0 && Number.isFinite(this.rate);
    if (!known) return this.wait(last);
    this.bar.max = last.total;
    this.bar.value = last.processed;
    const parts = [`${count(last.processed)} of ${count(last.total)} tokens`];
    if (last.cache > 0) parts.push(`${count(last.cache)} were known`);
    if (last.processed >= last.total) {
      parts.push("read");
    } else {
      const since = (performance.now() - last.at) / 1000;
      parts.push(`${count(this.rate)} a second`);
      parts.push(`about ${duration((last.total - last.processed) / this.rate - since)} left`);
    }
    this.say(parts.join(" · "));
  }

  /** A prompt of one chunk has no rate: how many tokens, and for how many seconds. */
  wait({ total, cache }) {
    this.bar.removeAttribute("value");
    const known = cache > 0 ? ` · ${count(cache)} were known` : "";
    this.say(`Reading ${plural(total - cache, "token")}${known} · ${duration((performance.now() - this.began) / 1000)}`);
  }

  end() {
    clearInterval(this.timer);
    this.place.hidden = true;
    this.place.replaceChildren();
  }
}
