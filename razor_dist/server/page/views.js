// Documents and turns as elements. What comes from outside becomes text, never markup.

import { button, copyOf, copyText } from "./dom.js";
import { count, plural, roughTokens } from "./format.js";
import { blockElement, blocksOf } from "./markdown.js";
import { isSame, reader } from "./reader.js";
import { citations, sentenceMarks, sourceItems, strangeNumbers } from "./sources.js";

// Milliseconds between two renderings of an answer that grows.
const RENDER = 100;

export function documentSize({ text, tokens }) {
  const size = tokens ? plural(tokens, "token") : `about ${plural(roughTokens(text), "token")}`;
  return `${plural(text.length, "character")}, ${size}`;
}

function nameButton(name, open) {
  const made = button("", open);
  const shown = document.createElement("bdi");
  shown.textContent = name;
  made.className = "name";
  made.append(shown);
  return made;
}

/** An item for a file: `size` tells how it is, `remove` is called by its button, `open` by its name. */
export function documentItem(name, size, remove, problem = false, open = null) {
  const item = copyOf("document-template");
  item.querySelector(".name").textContent = name;
  if (open) item.querySelector(".name").replaceWith(nameButton(name, open));
  const words = item.querySelector(".size");
  words.textContent = size;
  words.classList.toggle("problem", problem);
  const button = item.querySelector(".remove");
  button.setAttribute("aria-label", `Remove ${name}`);
  button.addEventListener("click", remove);
  return item;
}

/** Gives the last piece of each sentence in a block the numbers of what it cites. */
function numbered(block, marks) {
  const pieces = [...block.querySelectorAll(".sentence")];
  pieces.forEach((piece, at) => {
    if (pieces[at + 1]?.dataset.sentence !== piece.dataset.sentence) piece.dataset.numbers = marks[piece.dataset.sentence].numbers;
  });
  return block;
}

export class TurnView {
  /** `documentOf` gives a document by its id; `actions` has regenerate, edit and remove of a turn. */
  constructor(turn, documentOf, actions) {
    this.turn = turn;
    this.documentOf = documentOf;
    this.element = copyOf("turn-template");
    this.blocks = []; // keys of the blocks of the answer that are shown
    this.cited = []; // by its sentences
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

  /** Takes more of the answer, or of its sources; `follow` runs what makes the page longer. */
  append(text, follow) {
    this.turn.answer += text;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      follow(() => this.render());
    }, this.blocks.length ? RENDER : 0);
  }

  /** Renders the blocks of the answer that have changed, by themselves or in what they cite. */
  render() {
    const { answer } = this.turn;
    const place = this.part(".answer");
    this.cited = citations(this.turn, this.documentOf).sentences;
    const marks = sentenceMarks(answer, this.cited, this.documentOf, () => this.light());
    const marked = document.activeElement?.closest?.(".answer") === place && document.activeElement.dataset.sentence;
    const blocks = blocksOf(answer).map((block) => {
      const own = marks.filter(({ from, to }) => from < block.to && to > block.from);
      return { block, own, key: [block.name, block.from, block.to, ...own.map(({ key }) => key)].join(" ") };
    });
    const same = blocks.findIndex(({ key }, at) => key !== this.blocks[at]);
    const kept = same < 0 ? blocks.length : same;
    while (place.childNodes.length > kept) place.lastChild.remove();
    for (const { block, own } of blocks.slice(kept)) place.append(numbered(blockElement(answer, block, own), marks));
    this.blocks = blocks.map(({ key }) => key);
    // Who is at a sentence stays there.
    if (marked && document.activeElement === document.body) place.querySelector(`[data-sentence="${marked}"]`)?.focus();
  }

  /** Lights the passages of this turn in the text; returns those of its last sentence that cites. */
  light() {
    const { passages, sentences } = citations(this.turn, this.documentOf);
    reader.light(passages, (passage) => this.point(passage));
    return sentences.at(-1)?.passages ?? [];
  }

  /** Marks the sentences that cite a passage, or none. */
  point(passage) {
    for (const piece of this.element.querySelectorAll(".sentence")) {
      piece.classList.toggle("pointed", Boolean(passage) && this.cited[piece.dataset.sentence].passages.some((one) => isSame(one, passage)));
    }
  }

  /** Shows the turn as it is when nothing more comes. */
  show() {
    clearTimeout(this.timer);
    this.timer = null;
    const { answer, note, usage, sentences = [], grounded = null } = this.turn;
    this.render();
    const { passages } = citations(this.turn, this.documentOf);
    this.part(".note").textContent = note;
    this.part(".note").hidden = !note;
    this.part(".usage").textContent = usage ? usageWords(usage) : "";
    this.part(".actions").hidden = !answer && !note;
    // The document of a summary in parts is not there to be read again.
    this.part(".regenerate").hidden = this.part(".edit").hidden = Boolean(this.turn.summary);
    this.part(".sources").hidden = !(passages.length || (grounded !== null && this.turn.hadDocuments));
    this.part(".sources ol").replaceChildren(...sourceItems(passages, this.documentOf, () => this.light()));
    this.part(".grounded").textContent = grounded === null ? "" : groundedWords(grounded, passages);
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
function groundedWords(grounded, passages) {
  if (!passages.length) return "Few of the words come from the documents: the model's own, mostly.";
  const share = grounded >= 0.7 ? "Most of the words come" : grounded >= 0.5 ? "About half of the words come" : "Some of the words come";
  return `${share} from ${passages.length > 1 ? "these passages" : "this passage"}:`;
}

export function usageWords({ prompt_tokens, completion_tokens, prompt_tokens_details }) {
  const known = prompt_tokens_details?.cached_tokens;
  const news = known === undefined ? "" : `, ${count(prompt_tokens - known)} of them new`;
  const answer = completion_tokens === undefined ? "" : ` · answer ${plural(completion_tokens, "token")}`;
  return `Prompt ${plural(prompt_tokens, "token")}${news}${answer}`;
}
