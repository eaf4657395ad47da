// What can be taken away: to the clipboard, as a command or a program, and as a file.

import { h, announce } from "./dom.js";
import { hasKey } from "./api.js";

const OPENAI_FIELDS = new Set(["model", "messages", "seed", "temperature", "top_p", "max_tokens", "stop", "prediction", "logprobs", "top_logprobs"]);

export function copyButton(text, content) {
  const button = h("button", { type: "button", class: "quiet small", onclick: async () => {
    const isCopied = await copy(content());
    announce(isCopied ? "Copied" : "The browser does not allow copying");
    button.textContent = isCopied ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = text), 1500);
  } }, text);
  return button;
}

// Pages that came over plain HTTP from another machine have no clipboard API.
async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not allowed; the older way may be.
    }
  }
  const focused = document.activeElement;
  const area = h("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function asCurl(request) {
  const lines = [`curl ${quoted(new URL("v1/chat/completions", document.baseURI).href)}`, "-H 'Content-Type: application/json'"];
  if (hasKey()) lines.push('-H "Authorization: Bearer $FORERUN_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(request, null, 2))}`);
  return `${lines.join(" \\\n  ")}\n`;
}

// With OpenAI's client; fields that are not OpenAI's go into its extra_body.
export function asPython(request) {
  const all = Object.entries(request);
  const extra = Object.fromEntries(all.filter(([name]) => !OPENAI_FIELDS.has(name)));
  const given = all.filter(([name]) => OPENAI_FIELDS.has(name)).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  if (Object.keys(extra).length) given.push(`    extra_body=${literal(extra, 1)},\n`);
  const key = hasKey() ? 'os.environ["FORERUN_API_KEY"]' : '"none"';
  return `${hasKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(new URL("v1", document.baseURI).href)}, api_key=${key})
completion = client.chat.completions.create(
${given.join("")})
print(completion.choices[0].message.content)
`;
}

export function asMarkdown({ title, system, turns }) {
  const parts = [`# ${title}`];
  if (system) parts.push("## System", system);
  for (const { question, answers } of turns) {
    parts.push("## User", question);
    for (const { title: by, text } of answers) parts.push(`## Assistant${answers.length > 1 ? ` (${by})` : ""}`, text);
  }
  return `${parts.join("\n\n")}\n`;
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

// A JSON value as Python writes it.
function literal(value, depth = 0) {
  const pad = "    ".repeat(depth);
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${pad}    ${literal(one, depth + 1)},\n`).join("")}${pad}]` : "[]";
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const rows = Object.entries(value).map(([name, one]) => `${pad}    ${JSON.stringify(name)}: ${literal(one, depth + 1)},\n`);
  return rows.length ? `{\n${rows.join("")}${pad}}` : "{}";
}
