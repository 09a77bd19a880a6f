// Documents and turns as elements. What comes from outside becomes text, never markup.

import { count, plural, roughTokens } from "./format.js";
import { blockElement, blocksOf } from "./markdown.js";
import { sentenceMarks, sourceItems, strangeNumbers } from "./sources.js";

// Milliseconds between two renderings of an answer that grows.
const RENDER = 100;

export const $ = (id) => document.getElementById(id);

const copyOf = (id) => $(id).content.firstElementChild.cloneNode(true);

export function documentSize({ text, tokens }) {
  const size = tokens ? plural(tokens, "token") : `about ${plural(roughTokens(text), "token")}`;
  return `${plural(text.length, "character")}, ${size}`;
}

/** An item for a file: `size` tells how it is, `remove` is called by its button. */
export function documentItem(name, size, remove, problem = false) {
  const item = copyOf("document-template");
  item.querySelector(".name").textContent = name;
  const words = item.querySelector(".size");
  words.textContent = size;
  words.classList.toggle("problem", problem);
  const button = item.querySelector(".remove");
  button.setAttribute("aria-label", `Remove ${name}`);
  button.addEventListener("click", remove);
  return item;
}

export function button(words, action) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", textContent: words });
  made.addEventListener("click", action);
  return made;
}

export class TurnView {
  /** `documentOf` gives a document by its id; `actions` has regenerate, edit and remove of a turn. */
  constructor(turn, documentOf, actions) {
    this.turn = turn;
    this.documentOf = documentOf;
    this.element = copyOf("turn-template");
    this.blocks = []; // keys of the blocks of the answer that are shown
    this.timer = null;
    this.part(".question").textContent = turn.question;
    for (const { name } of turn.documents) {
      const item = document.createElement("li");
      const shown = document.createElement("bdi");
      shown.textContent = name;
      item.append(shown);
      this.part(".documents").append(item);
    }
    this.part(".copy").addEventListener("click", (event) => this.copy(event.currentTarget));
    for (const [name, act] of Object.entries(actions)) {
      this.part(`.${name}`).addEventListener("click", () => act(turn));
    }
    this.show();
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  get reading() {
    return this.part(".reading");
  }

  /** Takes more of the answer; `follow` runs what makes the page longer. */
  append(text, follow) {
    this.turn.answer += text;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      follow(() => this.render());
    }, this.blocks.length ? RENDER : 0);
  }

  /** Renders the blocks of the answer that have changed, or all if there are marks to show. */
  render(marks = []) {
    const { answer } = this.turn;
    const place = this.part(".answer");
    const known = marks.length ? [] : this.blocks;
    const blocks = blocksOf(answer).map((block) => ({ block, key: `${block.name} ${block.from} ${block.to}` }));
    const same = blocks.findIndex(({ key }, at) => key !== known[at]);
    const kept = same < 0 ? blocks.length : same;
    while (place.childNodes.length > kept) place.lastChild.remove();
    for (const { block } of blocks.slice(kept)) place.append(blockElement(answer, block, marks));
    this.blocks = marks.length ? [] : blocks.map(({ key }) => key);
  }

  /** Shows the turn as it is when nothing more comes. */
  show() {
    clearTimeout(this.timer);
    this.timer = null;
    const { answer, note, usage, sentences = [], sources = [], grounded = null } = this.turn;
    this.render(sentenceMarks(answer, sentences, this.documentOf));
    this.part(".note").textContent = note;
    this.part(".note").hidden = !note;
    this.part(".usage").textContent = usage ? usageWords(usage) : "";
    this.part(".actions").hidden = !answer;
    // The document of a summary in parts is not there to be read again.
    this.part(".regenerate").hidden = this.part(".edit").hidden = Boolean(this.turn.summary);
    const asksDocuments = sources.some(({ document }) => this.documentOf(document)) || this.turn.hadDocuments;
    this.part(".sources").hidden = grounded === null || !asksDocuments;
    this.part(".sources ol").replaceChildren(...sourceItems(sources, this.documentOf));
    this.part(".grounded").textContent = grounded === null ? "" : groundedWords(grounded, sources);
    const strange = strangeNumbers(answer, sentences, this.documentOf);
    this.part(".numbers").hidden = !strange.length;
    this.part(".numbers").textContent = `Check ${strange.join(", ")}: not so in the sources of the sentence.`;
  }

  async copy(button) {
    await copyText(this.turn.answer);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
}

/** What the server's score says of where an answer's words come from (docs/sources.md). */
export function groundedWords(grounded, sources) {
  if (!sources.length) return "Few of the words come from the documents: the model's own, mostly.";
  const share = grounded >= 0.7 ? "Most of the words come" : grounded >= 0.5 ? "About half of the words come" : "Some of the words come";
  return `${share} from ${sources.length > 1 ? "these passages" : "this passage"}:`;
}

export function usageWords({ prompt_tokens, completion_tokens, prompt_tokens_details }) {
  const known = prompt_tokens_details?.cached_tokens;
  const news = known === undefined ? "" : `, ${count(prompt_tokens - known)} of them new`;
  const answer = completion_tokens === undefined ? "" : ` · answer ${plural(completion_tokens, "token")}`;
  return `Prompt ${plural(prompt_tokens, "token")}${news}${answer}`;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS only pages of this machine have the clipboard.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown;charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
