// The frame: which view is shown, the theme, the key, and what the server says of itself.

import { getKey, onKeyNeeded, request, setKey } from "./api.js";
import { mountChat } from "./chat/chat.js";
import { byId } from "./dom.js";
import { mountLive } from "./live/live.js";

const THEMES = ["auto", "light", "dark"];
const ASK_AGAIN_MS = 5000;

// A view is made once, when it is first shown. mount(root) returns {show(), hide()}.
const VIEWS = { chat: mountChat, live: mountLive };
const mounted = {};
let shown = null;

function showView() {
  const name = Object.hasOwn(VIEWS, location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  if (name === shown) return;
  const moved = shown !== null;
  if (moved) mounted[shown].hide();
  shown = name;
  for (const each of Object.keys(VIEWS)) byId(`view-${each}`).hidden = each !== name;
  for (const tab of document.querySelectorAll(".tabs a")) {
    if (tab.dataset.view === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  document.title = name === "chat" ? "FASER" : "FASER · live";
  mounted[name] ??= VIEWS[name](byId(`view-${name}`));
  mounted[name].show();
  if (moved) byId(`view-${name}`).focus({ preventScroll: true });
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `Theme: ${theme === "auto" ? "automatic" : theme}`);
  byId("theme").title = byId("theme").getAttribute("aria-label");
  try {
    localStorage.setItem("faser-theme", theme);
  } catch {
    // a browser that keeps nothing
  }
}

function chosenTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function storedTheme() {
  try {
    const theme = localStorage.getItem("faser-theme");
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

// One question at a time, however many requests wait for the key. Resolves to whether there is a new key.
let asking = null;
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("ask-key");
    byId("ask-key-wrong").textContent = wrong ? "The server rejected that key." : "";
    byId("ask-key-wrong").hidden = !wrong;
    byId("key-field").value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      const key = byId("key-field").value.trim();
      byId("key-field").value = "";
      const given = dialog.returnValue === "use" && key !== "";
      if (given) setKey(key);
      byId("key").hidden = false;
      asking = null;
      resolve(given);
    }, { once: true });
  });
  return asking;
}

// What /ready and /v1/models say; asked again until the server is ready, and from time to time.
async function watchServer() {
  let state = "unreachable";
  let words = "unreachable";
  try {
    const answer = await fetch(new URL("ready", new URL(".", document.baseURI)), { cache: "no-store" });
    const said = await answer.json();
    state = said.ready ? "ready" : said.reason ?? "loading";
    words = said.message ? `${state}: ${said.message}` : state;
  } catch {
    // no answer
  }
  const chip = byId("state");
  if (chip.textContent !== words) {
    chip.textContent = words;
    chip.dataset.state = state;
  }
  if (state === "ready" && !byId("model").textContent && !asking) await showModel();
  setTimeout(watchServer, document.hidden ? 6 * ASK_AGAIN_MS : ASK_AGAIN_MS);
}

// Asks for a key once; who declines finds the button.
let hasAsked = false;
async function showModel() {
  const quiet = hasAsked;
  hasAsked = true;
  try {
    const models = await (await request("v1/models", { quiet })).json();
    byId("model").textContent = models.data[0].id;
    const context = models.data[0].max_model_len; // null: of several models, this one has yet to be loaded
    byId("model").title = context === null ? "not loaded yet" : `context of ${context} tokens`;
    byId("key").hidden = getKey() === null;
    dispatchEvent(new CustomEvent("faser-models", { detail: models.data }));
  } catch {
    // asked again later
  }
}

onKeyNeeded(askForKey);
setTheme(storedTheme());
byId("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length]);
});
byId("key").addEventListener("click", async () => {
  if (await askForKey(null)) showModel();
});
byId("key-cancel").addEventListener("click", () => byId("ask-key").close(""));
addEventListener("hashchange", showView);
showView();
watchServer();
