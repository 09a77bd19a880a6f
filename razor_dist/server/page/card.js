// What a sentence of an answer came from, in a card beside it: by the pointer or the focus.

import { $ } from "./dom.js";
import { reader } from "./reader.js";

// Milliseconds that the pointer rests on a sentence before its card comes, and is away before it goes.
const REST = 120;
const AWAY = 250;
const QUOTE = 280; // characters
const GAP = 6; // pixels

let owner = null;
let timer = null;

/** Gives a sentence's element a card with its passages; `enter` is called as it comes. */
export function hasCard(element, passages, documentOf, enter) {
  const come = () => {
    enter();
    show(element, passages, documentOf);
  };
  element.addEventListener("pointerenter", ({ pointerType }) => pointerType === "touch" || later(come, REST));
  element.addEventListener("pointerleave", () => later(hide, AWAY));
  element.addEventListener("focus", () => element.matches(":focus-visible") && later(come, 0));
  element.addEventListener("blur", () => later(hide, 0));
}

function later(action, milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(action, milliseconds);
}

function show(element, passages, documentOf) {
  if (!element.isConnected) return;
  hide();
  owner = element;
  const card = $("card");
  card.replaceChildren(...passages.map((passage) => entry(passage, documentOf(passage.document))));
  card.showPopover();
  element.setAttribute("aria-describedby", "card");
  mark(true);
  reader.point(passages);
  const [line, box] = [element.getClientRects()[0], card.getBoundingClientRect()];
  const below = element.getBoundingClientRect().bottom + GAP;
  const top = below + box.height < innerHeight ? below : Math.max(GAP, line.top - box.height - GAP);
  card.style.top = `${top}px`;
  card.style.left = `${Math.max(GAP, Math.min(line.left, innerWidth - box.width - GAP))}px`;
}

/** Marks all pieces of the owner's sentence, which emphasis and lines can make several. */
function mark(isOwner) {
  for (const piece of owner.closest(".answer")?.querySelectorAll(`[data-sentence="${owner.dataset.sentence}"]`) ?? []) {
    piece.classList.toggle("pointed", isOwner);
  }
}

function entry({ number, text, weight }, found) {
  const place = document.createElement("p");
  const about = document.createElement("span");
  about.className = "size";
  about.textContent = `${number} · ${found.name} · ${Math.round(100 * weight)} %`;
  const quote = document.createElement("bdi");
  quote.textContent = text.length > QUOTE ? `${text.slice(0, QUOTE)}…` : text;
  place.append(about, quote);
  return place;
}

/** Takes the card away; returns whether there was one. */
export function hide() {
  clearTimeout(timer);
  if (!owner) return false;
  owner.removeAttribute("aria-describedby");
  mark(false);
  owner = null;
  $("card").hidePopover();
  reader.point([]);
  return true;
}

$("card").addEventListener("pointerenter", () => clearTimeout(timer));
$("card").addEventListener("pointerleave", () => later(hide, AWAY));
