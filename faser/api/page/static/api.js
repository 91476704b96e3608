// Requests to the server that served this page: addresses, the API key, and errors in words.

const KEY = "faser-key";
let askForKey = async () => null;  // app.js sets it

export class ServerError extends Error {
  // status 0: there was no answer. retryAfterS: seconds, or null.
  constructor(message, { status = 0, param = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfterS = retryAfterS;
  }
}

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function getKey() {
  return sessionStorage.getItem(KEY);
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// The address of a route: relative to the page, so a path that a proxy puts in front stays there.
export function address(route) {
  return new URL(route.replace(/^\//, ""), new URL(".", document.baseURI)).href;
}

// fetch() with the key. Asks for a key when the server wants one, unless quiet. Throws ServerError for every answer but
// 2xx, and AbortError as fetch does.
export async function request(route, { headers = {}, quiet = false, ...options } = {}) {
  for (;;) {
    const key = getKey();
    const withKey = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
    let answer;
    try {
      answer = await fetch(address(route), { ...options, headers: withKey, credentials: "omit", cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.");
    }
    if (answer.ok) return answer;
    const failure = await errorOf(answer);
    if (answer.status !== 401 || quiet) throw failure;
    if (getKey() === key && !(await askForKey(key ? failure.message : null))) throw failure;
  }
}

export function postJson(route, body, options = {}) {
  return request(route, {
    ...options, method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  });
}

async function errorOf(answer) {
  const retryAfterS = Number(answer.headers.get("Retry-After")) || null;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // a proxy's page, or nothing
  }
  const message = error.message ?? `The server answered with status ${answer.status}.`;
  return new ServerError(message, { status: answer.status, param: error.param ?? null, retryAfterS });
}
