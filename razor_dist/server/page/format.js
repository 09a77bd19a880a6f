// Numbers in words.

export const count = (number) => Math.round(number).toLocaleString("en");

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) [number, unit] = [number / 1024, unit + 1];
  return `${number >= 100 || unit === 0 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** About how many tokens a text has; the server's own count comes with its first answer. */
export const roughTokens = (text) => Math.ceil(text.length / 4);
