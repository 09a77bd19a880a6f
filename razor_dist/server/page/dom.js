// Elements, the clipboard and downloads.

export const $ = (id) => document.getElementById(id);

export const copyOf = (id) => $(id).content.firstElementChild.cloneNode(true);

export function button(words, action) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", textContent: words });
  made.addEventListener("click", action);
  return made;
}

export async function copyText(text) {
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
