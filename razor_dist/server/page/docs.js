// Sends the examples of `/docs` and shows the answers.

import { key } from "./api.js";

for (const form of document.querySelectorAll("form[data-path]")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const [body, answer] = [form.querySelector("textarea"), form.querySelector("pre")];
    answer.hidden = false;
    answer.textContent = "Sent; waiting for the answer.";
    const headers = { "Content-Type": "application/json" };
    if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
    try {
      const response = await fetch(form.dataset.path, { method: "POST", headers, body: body.value });
      const text = await response.text();
      const json = response.headers.get("Content-Type")?.includes("json");
      answer.textContent = `${response.status}\n${json ? JSON.stringify(JSON.parse(text), null, 2) : text}`;
      if (response.status === 401) answer.textContent += "\nThe key is set in the settings of the page.";
    } catch {
      answer.textContent = "The server cannot be reached.";
    }
  });
}
