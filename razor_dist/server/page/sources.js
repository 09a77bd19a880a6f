// Where an answer came from: its passages with their numbers, and the sentences that cite them.

import { hasCard } from "./card.js";
import { reader } from "./reader.js";

const QUOTE = 160; // characters
// Passages of less weight were never the place that was asked for (docs/sources.md).
const LEAST = 0.05;
// What a sentence cites: as in the citations of `/v1/messages` (docs/sources.md).
const CITED = 0.1;
const GROUNDED = 0.4;
const STEP = 1024; // characters between two known indices

/** The index in a string of its n-th character: the server counts whole ones, not halves. */
export function indexOf(text, n, from = 0) {
  let index = from;
  for (; n > 0 && index < text.length; n--) index += text.codePointAt(index) > 0xffff ? 2 : 1;
  return index;
}

/** Indices of characters in a long text that is asked about often. */
class Characters {
  constructor(text) {
    this.text = text;
    this.known = /[\ud800-\udbff]/.test(text) ? [0] : null; // null: no halves
  }

  index(n) {
    const { text, known } = this;
    if (!known) return Math.min(n, text.length);
    while (known.length <= n / STEP && known.at(-1) < text.length) known.push(indexOf(text, STEP, known.at(-1)));
    const at = Math.min(Math.floor(n / STEP), known.length - 1);
    return indexOf(text, n - at * STEP, known[at]);
  }
}

/**
 * A function that finds the server's `sources` in a conversation: the document's id and where in
 * its text; a passage of a question or an answer has no document.
 */
export function locator(conversation) {
  const contents = conversation.messages().map(({ content }) => new Characters(content));
  return (sources) =>
    sources.map(({ start, end, weight, text, message }) => {
      const [from, to] = [contents[message].index(start), contents[message].index(end)];
      return { text, weight, ...conversation.documentAt(message, from), length: to - from };
    });
}

/** A heading points at the passage below it and says nothing itself. */
const isHeading = (text) => /^#{1,6} [^\n]*$/.test(text.trim());

/**
 * {passages, sentences} of a turn: passages of documents with the numbers by which they are cited,
 * in the order of the answer; sentences {from, to, passages} in the answer's text.
 */
export function citations({ answer, sentences = [], sources = [] }, documentOf) {
  const passages = [];
  const numbered = (source) => {
    let found = passages.find(({ document, begin }) => document === source.document && begin === source.begin);
    if (!found) passages.push((found = { ...source, number: passages.length + 1 }));
    found.weight = Math.max(found.weight, source.weight);
    return found;
  };
  const worth = (all, least) => all.filter(({ document, weight, text }) => documentOf(document) && weight >= least && !isHeading(text));
  const citing = [];
  for (const { start, end, grounded = 1, sources: own } of sentences) {
    const cited = grounded < GROUNDED ? [] : worth(own, CITED).map(numbered);
    if (cited.length) citing.push({ from: indexOf(answer, start), to: indexOf(answer, end), passages: cited });
  }
  const rest = worth(sources, LEAST);
  (rest.length || passages.length ? rest : sources.filter(({ document }) => documentOf(document)).slice(0, 1)).forEach(numbered);
  return { passages, sentences: citing };
}

/** The list of an answer's passages; `light` lights them all in the text. */
export function sourceItems(passages, documentOf, light) {
  return passages.map((passage) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    const quote = document.createElement("bdi");
    quote.textContent = passage.text.length > QUOTE ? `${passage.text.slice(0, QUOTE)}…` : passage.text;
    Object.assign(button, { type: "button", className: "source" });
    button.append(quote);
    button.addEventListener("click", () => {
      light();
      reader.open(passage);
    });
    const about = document.createElement("span");
    about.className = "size";
    about.textContent = ` ${documentOf(passage.document).name}, ${Math.round(100 * passage.weight)} %`;
    item.append(button, about);
    return item;
  });
}

/** The sentences of an answer that cite something, as marks for `markdown.js`. */
export function sentenceMarks(answer, sentences, documentOf, light) {
  return sentences.map(({ from, to, passages }, at) => {
    const open = () => {
      light();
      reader.open(passages[0]);
    };
    const make = (isFirst) => {
      const words = document.createElement("span"); // a button element would not break into lines
      words.className = "sentence";
      words.dataset.sentence = at;
      words.addEventListener("click", open);
      hasCard(words, passages, documentOf, light);
      if (isFirst) asButton(words, answer.slice(from, to), open);
      return words;
    };
    const key = `${from} ${to} ${numbersOf(passages)}`;
    return { from, to, make, key, numbers: numbersOf(passages) };
  });
}

const numbersOf = (passages) => passages.map(({ number }) => number).join(", ");

/** Of the pieces of a sentence the first is a button for the whole; others answer to the pointer. */
function asButton(words, sentence, open) {
  Object.assign(words, { role: "button", tabIndex: 0, ariaLabel: sentence.trim() });
  words.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    open();
  });
}

const NUMBER = /\d[\d.,]*/g;

/** Numbers of an answer that no source has as they are: "41.3" where the text has 41 and 41,300. */
export function strangeNumbers(answer, sentences, documentOf) {
  const numbersIn = (text) => (text.match(NUMBER) ?? []).map((one) => one.replace(/[.,]+$/, "").replaceAll(",", ""));
  const found = new Set();
  for (const { start, end, sources } of sentences) {
    const known = sources.filter(({ document }) => documentOf(document)).map(({ text }) => text);
    if (!known.length) continue;
    const said = answer.slice(indexOf(answer, start), indexOf(answer, end));
    const written = new Set(numbersIn(known.join(" ")));
    // The number of a list's item is the answer's own.
    for (const number of numbersIn(said.replace(/^\s*\d+[.)]\s/gm, ""))) if (!written.has(number)) found.add(number);
  }
  return [...found];
}
