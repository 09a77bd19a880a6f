// Documents that are longer than the model's context: their size, their beginning, their parts.

import * as api from "./api.js";

// Tokens beside a part: the chat template, the instruction, the document's name.
const BESIDE = 200;
// Tokens of the shortest part that is worth a request.
const LEAST = 100;

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
  if (text.codePointAt(most - 1) <= 0xffff) return most;
  return most - 1 > begin ? most - 1 : most + 1; // not between the halves of a character
}

/** Tokens of a text, counted by the server; Infinity for one that is too long to be counted at once. */
export async function tokensIn(text, signal) {
  try {
    return await api.tokens(text, signal);
  } catch (error) {
    if (error.status !== 413) throw error;
    return Infinity;
  }
}

/**
 * Tokens of a text, counted by the server in pieces; 0 for a short one of few characters but ASCII's,
 * whose tokens can be guessed. It fits, as no byte has more than one.
 */
export async function countTokens(text, limit, signal) {
  if (text.length <= limit && new TextEncoder().encode(text).length <= Math.min(limit, 1.2 * text.length)) return 0;
  let tokens = 0;
  // The server counts a few contexts of tokens at once; scripts differ in the tokens of a character.
  for (let begin = 0, length = 2 * limit; begin < text.length && tokens < Infinity; ) {
    const end = endOf(text, begin, length);
    const found = await tokensIn(text.slice(begin, end), signal);
    if (found === Infinity && length > 1) {
      length = Math.ceil(length / 2);
      continue;
    }
    tokens += found;
    begin = end;
  }
  return tokens;
}

/** Tokens of a part that leave room for an answer; 0 if that is too few for parts. */
export function roomFor(limit, answer) {
  const room = limit - answer - BESIDE;
  return room < LEAST ? 0 : room;
}

/**
 * The end of a piece from `from`, at a paragraph, line or word, that has at most `tokens` tokens; of
 * one character at least, whatever its tokens.
 */
export async function beginning(text, from, tokens, perToken, signal) {
  let length = Math.max(1, Math.ceil(tokens * perToken));
  while (true) {
    const end = endOf(text, from, length);
    const found = await tokensIn(text.slice(from, end), signal);
    if (found <= tokens || length === 1) return { end, tokens: found };
    const share = found === Infinity ? 0.5 : (0.97 * tokens) / found;
    length = Math.max(1, Math.floor((end - from) * share));
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
