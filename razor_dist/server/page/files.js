// Files that were chosen or dropped, alone or in folders.

// Files of a dropped folder that are taken at most: each is read by the server.
const MOST = 200;

/** {files, left}: what was dropped, folders with all that is in them; `left` says what was not taken. */
export async function dropped(transfer) {
  // Asked for at once: later the browser has forgotten them.
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some(({ isDirectory }) => isDirectory)) return { files: [...transfer.files], left: "" };
  const found = { files: [], unread: 0 };
  for (const entry of entries) await walk(entry, found);
  return ofFolder(found.files, found.unread);
}

async function walk(entry, found) {
  if (entry.name.startsWith(".")) return;
  try {
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      found.files.push(new File([file], entry.fullPath.slice(1)));
      return;
    }
    const reader = entry.createReader();
    while (true) {
      const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) return; // a hundred come at a time
      for (const one of some) await walk(one, found);
    }
  } catch {
    found.unread++;
  }
}

/** What was chosen by the input for folders. */
export function chosenFolder(files) {
  const isShown = (path) => !path.split("/").some((part) => part.startsWith("."));
  const shown = [...files].filter((file) => isShown(file.webkitRelativePath));
  return ofFolder(shown.map((file) => new File([file], file.webkitRelativePath)));
}

/** Of a folder's files those of the kinds that can be read, in the order of their names. */
function ofFolder(all, unread = 0) {
  const kinds = document.getElementById("files").accept.split(",");
  const readable = all.filter(({ name }) => kinds.some((kind) => name.toLowerCase().endsWith(kind)));
  readable.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
  const files = readable.slice(0, MOST);
  const left = unread ? [`${unread} that cannot be read`] : [];
  if (all.length > readable.length) left.push(`${all.length - readable.length} of kinds that are not read`);
  if (readable.length > MOST) left.push(`${readable.length - MOST} beyond the first ${MOST}`);
  return { files, left: left.length ? `Files left out: ${left.join("; ")}.` : "" };
}
