// What the page says of itself: to who cannot see it, and when something went wrong.

import * as api from "./api.js";
import { $, button } from "./dom.js";
import { app } from "./state.js";

export function announce(words) {
  $("announce").textContent = words;
}

/** A sentence above the question; `undo` gets a button. */
export function notice(words, undo = null) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
  if (undo) $("notice").append(" ", button("Undo", undo));
}

/** Says what went wrong, and opens the settings if the key is wanted. */
export function tell(error) {
  if (!(error instanceof api.ApiError)) {
    console.error(error);
    return `Something went wrong in this page: ${error.message}`;
  }
  if (error.wantsKey) app.openSettings("This server wants an API key that it knows.");
  return error.message;
}
