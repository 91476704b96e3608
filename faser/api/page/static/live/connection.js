// The connection to GET /live: open while the view is seen, and opened again when it breaks.

import { request } from "../api.js";
import { dataOf } from "../chat/sse.js";

const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 30;
const SILENCE_S = 15; // a server that sends a sample a second has gone

// on.message(object), on.state({kind, words}): connecting, live, waiting (retryS), off, paused.
export class LiveConnection {
  constructor(on) {
    this.on = on;
    this.wanted = false;
    this.controller = null;
    this.timer = 0;
    this.waitS = FIRST_WAIT_S;
    document.addEventListener("visibilitychange", () => this.settle());
  }

  open() {
    this.wanted = true;
    this.waitS = FIRST_WAIT_S;
    this.settle();
  }

  close() {
    this.wanted = false;
    this.settle();
  }

  // Connected exactly while it is wanted and the tab is seen.
  settle() {
    const runs = this.wanted && !document.hidden;
    clearTimeout(this.timer);
    if (runs && !this.controller) this.read();
    if (!runs) {
      this.controller?.abort();
      this.controller = null;
      this.on.state({ kind: "paused" });
    }
  }

  async read() {
    const controller = (this.controller = new AbortController());
    this.on.state({ kind: "connecting" });
    let failure = { words: "The connection is lost", retryS: null, off: false };
    let silence = 0;
    try {
      const answer = await request("live", { signal: controller.signal });
      const listen = () => {
        clearTimeout(silence);
        silence = setTimeout(() => controller.abort(), 1000 * SILENCE_S);
      };
      listen();
      for await (const data of dataOf(answer)) {
        const message = JSON.parse(data);
        listen();
        if (controller !== this.controller) return;
        if (message.end) failure.words = ENDS[message.end] ?? failure.words;
        else {
          this.waitS = FIRST_WAIT_S;
          this.on.state({ kind: "live" });
          this.on.message(message);
        }
      }
    } catch (error) {
      if (controller !== this.controller) return;
      if (error.name !== "AbortError" && error.status !== undefined) {
        failure = {
          words: error.message.replace(/\.$/, ""),
          retryS: error.retryAfterS,
          off: [401, 404].includes(error.status),
        };
      }
    } finally {
      clearTimeout(silence);
    }
    if (controller !== this.controller) return;
    this.controller = null;
    if (failure.off) {
      this.on.state({ kind: "off", words: failure.words });
      return;
    }
    const waitS = Math.max(failure.retryS ?? 0, this.waitS);
    this.waitS = Math.min(LONGEST_WAIT_S, 2 * this.waitS);
    this.on.state({ kind: "waiting", words: failure.words, retryS: waitS });
    this.timer = setTimeout(() => this.settle(), 1000 * waitS * (0.85 + 0.3 * Math.random()));
  }
}

const ENDS = {
  key: "The API key was removed",
  slow: "This page did not keep up",
  closing: "The server has ended",
  failed: "The server's live view has failed",
};
