// The contexts that the server keeps for this key: asked at once, and ended.

import * as api from "./api.js";
import { Conversation, nameIn } from "./conversation.js";
import { $, copyOf } from "./dom.js";
import { bytes, count, duration } from "./format.js";
import { app, changed } from "./state.js";
import { announce, notice, tell } from "./words.js";

const NAME = /^Document ("(?:[^"\\\n]|\\.)*"):\s*/;

export const kept = { isPossible: false };

/** Shows the list as the server has it. */
export async function showContexts() {
  const { data, limit_bytes } = await api.contexts();
  const was = kept.isPossible;
  kept.isPossible = limit_bytes > 0;
  $("contexts").hidden = !kept.isPossible;
  $("contexts-room").textContent = data.length
    ? `Each question begins its time anew. Together at most ${bytes(limit_bytes)}.`
    : "Nothing is kept. Add documents and have them kept: they are asked at once then, without being sent or read again.";
  const focused = document.activeElement?.closest("#contexts-list li")?.dataset.id;
  const items = data.sort((one, other) => other.last_used_at - one.last_used_at).map(itemOf);
  $("contexts-list").replaceChildren(...items);
  if (focused) items.find(({ dataset }) => dataset.id === focused)?.querySelector("button").focus();
  if (was !== kept.isPossible) changed();
}

function itemOf(context) {
  const item = copyOf("context-template");
  const { name, rest } = describe(context.begins);
  item.dataset.id = context.id;
  item.querySelector(".name").textContent = name;
  item.querySelector(".begins").textContent = rest;
  const size = Object.values(context.bytes).reduce((sum, number) => sum + (number ?? 0), 0);
  const parts = [`${count(context.tokens)} tokens`, `${duration(context.expires_at - Date.now() / 1000)} left`];
  if (size) parts.push(bytes(size));
  item.querySelector(".size").textContent = parts.join(" · ");
  const act = (selector, words, action) => {
    const made = item.querySelector(selector);
    made.setAttribute("aria-label", `${words} ${name}`);
    made.addEventListener("click", () => attempt(() => action(context, name)));
    made.disabled = app.working !== null;
  };
  act(".ask", "Ask", ask);
  act(".end", "End", end);
  return item;
}

/** What a context is called: its first document, or how it begins. */
function describe(begins) {
  const head = NAME.exec(begins);
  const rest = begins.slice(head?.[0].length ?? 0).trim();
  return head ? { name: nameIn(head[1]), rest } : { name: rest.slice(0, 40), rest };
}

async function attempt(action) {
  try {
    await action();
  } catch (error) {
    notice(tell(error));
  }
  await showContexts().catch(() => {}); // what went wrong is told; the list is looked at again later
}

/** Begins a conversation with what is kept. */
async function ask(context, name) {
  const messages = await api.contextMessages(context.id);
  const { conversation } = app;
  const isAsked = conversation.kept?.id === context.id && conversation.holds && !conversation.turns.length;
  if (isAsked) return $("question").focus(); // pressed twice: Undo goes back to what was there before
  app.removing(() => (app.conversation = Conversation.fromContext(context, messages)), `You ask ${name} now, which is kept.`);
  $("question").focus();
}

async function end({ id }, name) {
  await api.endContext(id);
  if (app.conversation.kept?.id === id) app.conversation.kept = null;
  announce(`${name} is no longer kept.`);
  changed();
}
