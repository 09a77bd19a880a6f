// Documents that are longer than the model's context: their size, their beginning, their parts.

import * as api from "./api.js";

// Characters that are counted at a time; the server takes a few contexts of tokens at once.
const pieceLength = (limit) => 2 * limit;
// Tokens beside a part: the chat template, the instruction, the document's name.
const BESIDE = 200;

/** The end of a piece of at most `length` characters from `begin`: a paragraph's, line's or word's. */
export function endOf(text, begin, length) {
  const most = begin + length;
  if (most >= text.length) return text.length;
  const half = begin + Math.ceil(length / 2);
  const late = text.slice(half, most); // the search must not run through all that is before
  for (const between of ["\n\n", "\n", " "]) {
    const at = late.lastIndexOf(between);
    if (at >= 0) return half + at + between.length;
  }
  const isSplit = text.codePointAt(most - 1) > 0xffff; // not between the halves of a character
  return isSplit && most - 1 > begin ? most - 1 : most;
}

/** Tokens of a text, counted by the server; 0 for one that fits, as no byte has more than one. */
export async function countTokens(text, limit, signal) {
  if (text.length <= limit && new TextEncoder().encode(text).length <= limit) return 0;
  let tokens = 0;
  for (let begin = 0; begin < text.length; ) {
    const end = endOf(text, begin, pieceLength(limit));
    tokens += await api.tokens(text.slice(begin, end), signal);
    begin = end;
  }
  return tokens;
}

/** Tokens of a part that leave room for an answer. */
export const roomFor = (limit, answer) => Math.max(1, limit - answer - BESIDE);

/** The end of a piece from `from`, at a paragraph, line or word, that has at most `tokens` tokens. */
export async function beginning(text, from, tokens, perToken, signal) {
  let length = Math.ceil(tokens * perToken);
  while (true) {
    const end = endOf(text, from, length);
    const found = await api.tokens(text.slice(from, end), signal);
    if (found <= tokens) return { end, tokens: found };
    length = Math.floor(((end - from) * tokens * 0.97) / found);
  }
}

/** Yields {begin, end} of the parts of a document, each of at most `room` tokens. */
export async function* partsOf({ text, tokens }, room, signal) {
  for (let begin = 0; begin < text.length; ) {
    const { end } = await beginning(text, begin, room, text.length / tokens, signal);
    yield { begin, end };
    begin = end;
  }
}
