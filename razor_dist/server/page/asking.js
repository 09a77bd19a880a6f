// Requests to the model: a question, the same again, reading ahead, a summary in parts.

import * as api from "./api.js";
import { $ } from "./dom.js";
import { count, plural } from "./format.js";
import { partsOf, roomFor, tokensIn } from "./parts.js";
import { reader } from "./reader.js";
import { Reading } from "./reading.js";
import { ask } from "./session.js";
import { locator } from "./sources.js";
import { app, changed } from "./state.js";
import * as store from "./store.js";
import { TurnView, usageWords } from "./views.js";
import { announce, notice, tell } from "./words.js";

// Milliseconds between savings of an answer that grows.
const SAVE = 2000;
// Passages shown for an answer.
const SOURCES = 3;
// The wording that small models end by themselves (docs/LOG.md).
const ABOUT = "\n\nWhat is the text above about? Answer in three sentences.";
// Of Qwen3's templates and others: thoughts would become the summary of a part.
const UNTHINKING = { enable_thinking: false };
const ENDS = {
  length: () => `Cut off after ${count(app.settings.maxTokens)} tokens (Settings).`,
  repetition: () => "Ended by the server: the answer had begun to repeat itself.",
};

export async function knowModel() {
  // Until it is loaded the server does not tell how much it holds.
  if (!app.model?.max_model_len) app.model = await api.model();
}

async function body(messages, maxTokens, more = {}) {
  await knowModel();
  const temperature = app.settings.temperature === "" ? {} : { temperature: Number(app.settings.temperature) };
  return { model: app.model.id, messages, max_tokens: maxTokens, ...temperature, ...more };
}

/** The body of a request for the next answer, without what a context stands for. */
const asked = (messages, maxTokens, more) => {
  const { messages: sent, ...context } = app.conversation.asSent(messages);
  return body(sent, maxTokens, { ...more, ...context });
};

/** Does something that Stop ends; returns the error it ended with, if any. */
async function work(action) {
  app.working = new AbortController();
  notice("");
  changed();
  try {
    await action(app.working.signal);
    return null;
  } catch (error) {
    if (error.code === "model_not_found") app.model = await api.model().catch(() => app.model); // another now
    return error;
  } finally {
    app.working = null;
    changed();
  }
}

/** Runs a request; `use` gets its chunks. */
async function stream(request, place, signal, use) {
  const reading = new Reading(place, announce);
  let announced = "";
  const say = (words) => {
    reading.say(words);
    const sentence = words.replace(/\d+/g, "");
    if (sentence !== announced) announce(words); // not each second of a countdown
    announced = sentence;
  };
  try {
    for await (const chunk of ask(request, signal, say, withoutContext)) {
      if (chunk.prompt_progress) reading.update(chunk.prompt_progress);
      if (chunk.choices?.[0]?.delta?.content) reading.end();
      use(chunk);
    }
  } finally {
    reading.end();
  }
}

/** What was kept has expired: its text is sent again. Returns whether there was any. */
function withoutContext() {
  const had = app.conversation.kept !== null;
  app.conversation.kept = null;
  if (had) announce("The documents are no longer kept and are sent again.");
  return had;
}

/** A turn as an element; its sources may be documents of earlier ones. */
export function viewOf(turn) {
  const documentOf = (id) => id && app.conversation.documents.find((document) => document.id === id);
  return new TurnView(turn, documentOf, { regenerate, edit: app.edit, remove: app.removeTurn });
}

export async function send(question, more = {}, isAgain = false) {
  const before = app.conversation.snapshot();
  const turn = app.conversation.ask(question);
  turn.hadDocuments = app.conversation.documents.length > 0;
  const view = begin(turn, isAgain);
  const sources = app.tellsSources ? { return_sources: SOURCES } : {};
  const locate = locator(app.conversation);
  view.light();
  reader.isLeftAlone = true;
  let finish = null;
  const error = await work((signal) =>
    stream(() => asked(app.conversation.messages(), app.settings.maxTokens, { ...sources, ...more }), view.reading, signal, (chunk) => {
      if (chunk.usage) turn.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      finish = choice?.stop_reason ?? choice?.finish_reason ?? finish;
      if (choice?.sources) {
        turn.sources = locate(choice.sources);
        turn.grounded = choice.grounded;
      }
      for (const { start, end, grounded, sources } of choice?.sentences ?? []) {
        turn.sentences.push({ start, end, grounded, sources: locate(sources) });
      }
      grow(view, choice?.delta?.content);
      if (choice?.sentences?.length) showCited(view);
    }),
  );
  return finished(view, error, before, ENDS[finish]?.() ?? "");
}

function begin(turn, isAgain = false) {
  const view = viewOf(turn);
  $("turns").append(view.element);
  changed();
  if (!isAgain) store.save(app.conversation); // else a reload finds the old answer until another has begun
  toEnd();
  return view;
}

/** Lights what the sentences of an answer cite, as they come, and follows the last. */
function showCited(view) {
  view.append("", follow);
  const before = reader.passages.length;
  const [last] = view.light();
  if (last && reader.passages.length > before) reader.follow(last);
}

let saved = 0;

function grow(view, text) {
  if (!text) return;
  view.append(text, follow);
  if (performance.now() - saved < SAVE) return;
  saved = performance.now();
  view.turn.note = "Interrupted.";
  store.save(app.conversation);
}

/** Shows how a turn ended; without an answer all is as `before`. Returns whether there is one. */
function finished(view, error, before, note) {
  const { turn } = view;
  const stopped = error?.name === "AbortError";
  turn.note = stopped ? "Stopped." : error ? tell(error) : note || (turn.answer ? "" : "The model ended without an answer.");
  if (error && !turn.answer) {
    $("question").value ||= turn.summary ? "" : turn.question;
    app.goBack(before);
    notice(stopped ? "Stopped before an answer came." : turn.note);
    return false;
  }
  follow(() => view.show());
  view.light();
  announce(stopped ? "Stopped." : error ? turn.note : "The answer is complete.");
  store.save(app.conversation);
  changed();
  return true;
}

/** Asks the last question again, with other random numbers; the old answer stays if none comes. */
async function regenerate(turn) {
  const before = app.conversation.snapshot();
  app.conversation.cut(turn);
  $("turns").lastElementChild.remove();
  if (await send(turn.question, { seed: Math.floor(Math.random() * 2 ** 31) }, true)) return;
  if ($("question").value === turn.question) $("question").value = ""; // else it is being typed
  app.goBack(before);
}

/** Reads what waits before there is a question, so that its answer comes sooner. */
export async function readAhead() {
  let usage = null;
  const error = await work((signal) =>
    stream(() => asked(app.conversation.messagesAhead(), 1), document.querySelector("#ahead .reading"), signal, (chunk) => {
      usage = chunk.usage ?? usage;
    }),
  );
  if (error && error.name !== "AbortError") notice(tell(error));
  if (error || !usage) return;
  const { prompt_tokens, prompt_tokens_details } = usage;
  announce("The documents are read.");
  $("ahead-note").textContent = `Read. ${usageWords({ prompt_tokens, prompt_tokens_details })}`;
}

/** Has the documents of the first question kept by the server for a time: "5m", "1h", "1d", "7d". */
export async function keep(ttl) {
  const { conversation } = app;
  let kept = null;
  let held = []; // those that the request has: more may be added meanwhile
  const request = () => {
    const { messages, ...context } = conversation.toKeep(ttl);
    held = conversation.first.map(({ id }) => id);
    return body(messages, 1, context);
  };
  const error = await work((signal) =>
    stream(request, document.querySelector("#ahead .reading"), signal, ({ contexts }) => (kept = contexts?.at(-1) ?? kept)),
  );
  if (error && error.name !== "AbortError") notice(tell(error));
  if (error || conversation !== app.conversation) return;
  if (!kept) return notice("This is not kept: it is too short, or there is no room for it. It is read in a moment.");
  conversation.kept = { ...kept, documents: held };
  announce("The documents are kept.");
  store.save(conversation);
  changed();
}

/** Summarises a document that is longer than the context: each part by a request, then all. It leaves the list when all is done. */
export async function summarise(long) {
  const before = app.conversation.snapshot();
  const waiting = app.conversation.pending;
  const turn = app.conversation.ask(`Summarise ${long.name} in parts`);
  Object.assign(turn, { documents: [], summary: { name: long.name } });
  app.conversation.pending = waiting;
  const view = begin(turn);
  const room = roomFor(app.model.max_model_len, app.settings.maxTokens);
  const about = Math.ceil(long.tokens / room);
  const summaries = [];
  const one = async (title, content, signal) => {
    const done = turn.answer;
    view.append(`${done ? "\n\n" : ""}**${title}**\n\n`, follow); // saved with the first of its text
    const begun = turn.answer.length;
    const messages = [{ role: "user", content }];
    const request = () => body(messages, app.settings.maxTokens, { chat_template_kwargs: UNTHINKING });
    try {
      await stream(request, view.reading, signal, (chunk) => grow(view, chunk.choices?.[0]?.delta?.content));
    } catch (error) {
      if (turn.answer.length === begun) turn.answer = done; // no title without text
      throw error;
    }
    return turn.answer.slice(begun);
  };
  let note = "";
  const error = await work(async (signal) => {
    for await (const { begin, end } of partsOf(long, room, signal)) {
      const title = `Part ${summaries.length + 1} of about ${about}, characters ${count(begin)} to ${count(end)}`;
      summaries.push(await one(title, `${long.text.slice(begin, end)}${ABOUT}`, signal));
    }
    const all = summaries.join("\n\n");
    if ((await tokensIn(all, signal)) > room) {
      note = "The summaries together are longer than the context; there is none of them all.";
      return;
    }
    turn.together = await one("All together", all + ABOUT, signal);
  });
  if (!error) app.conversation.remove(long);
  finished(view, error, before, note || `Read in ${plural(summaries.length, "part")}, each by itself. The text itself is not in this conversation.`);
}

/** Keeps the end in view while it grows, unless the reader has scrolled away from it. */
function follow(change) {
  const atEnd = $("turns").getBoundingClientRect().bottom < innerHeight;
  change();
  if (atEnd) toEnd();
}

function toEnd() {
  $("turns").scrollIntoView({ block: "end" });
}
