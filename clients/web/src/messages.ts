// Words for people: what each error code and close reason means here, and what can be done about it. Pure.

export type Action = "retry" | "restart" | "rollback" | "reset" | "close" | "play" | "key" | "none";
export interface Notice {
  title: string; text: string; actions: Action[]; tone: "busy" | "good" | "bad";
  /** What the server said, in its own words. */
  detail?: string;
}

export const ACTION_LABELS: Record<Action, string> = {
  retry: "Try again", restart: "Start a new session", rollback: "Back to the last good block", reset: "Start over",
  close: "End the session", play: "Walk on", key: "Enter", none: "",
};

/** One clear sentence for every code of the protocol. */
export const CODES: Record<string, { text: string; actions?: Action[] }> = {
  bad_message: { text: "The server did not understand a message of this page. They may be of different versions: reload the page." },
  unsupported_version: { text: "The server speaks another version of the protocol: reload the page." },
  unsupported_format: { text: "The server can't send pictures in a format that this browser shows.", actions: ["retry"] },
  model_unknown: { text: "The server does not have this model.", actions: ["restart"] },
  prompt_unknown: { text: "The model does not know this place." },
  control_invalid: { text: "The model refused these keys." },
  schema_unknown: { text: "This model is not walked with these keys." },
  image_invalid: { text: "This picture can't be used. Try a PNG or JPEG." },
  invalid_argument: { text: "The server refused a value." },
  event_conflict: { text: "Two inputs got the same number; the later one was dropped." },
  stale: { text: "An input came too late and was dropped." },
  queue_full: { text: "The world can't keep up with so many inputs. Hold on a moment." },
  session_exists: { text: "A session with this name is already running.", actions: ["restart"] },
  session_not_found: { text: "The server does not know this session any more. It may have been restarted.", actions: ["restart"] },
  session_gone: { text: "The session waited for a while and was then ended.", actions: ["restart"] },
  session_busy: { text: "The session is in use in another window.", actions: ["retry", "restart"] },
  session_state: { text: "That is not possible right now." },
  session_failed: { text: "The session can't go on as it is." },
  tick_failed: { text: "The model failed to produce the next block." },
  aborted: { text: "The block was aborted." },
  horizon: { text: "The world has reached the longest walk that this model allows." },
  not_retained: { text: "That moment is too long ago: the world can't go back so far." },
  unsupported: { text: "This model can't do that." },
  capacity: { text: "All places on the server are taken. Try again when someone leaves.", actions: ["retry"] },
  unauthorized: { text: "The server wants an API key.", actions: ["key"] },
  origin_refused: { text: "The server does not accept this page's address. Open it under the server's own address, or allow this origin." },
  rate_limited: { text: "Too many messages in a short time. Hold on a moment." },
  message_too_large: { text: "That was too large for the server. Try a smaller picture or a shorter text." },
  handshake_timeout: { text: "The connection took too long to say what it wants.", actions: ["retry"] },
  stalled: { text: "The page did not show pictures for a while, so the session was ended.", actions: ["restart"] },
  resume_refused: { text: "The session belongs to another window now.", actions: ["restart"] },
  shutdown: { text: "The server is shutting down.", actions: ["retry"] },
  internal: { text: "Something went wrong in the server. Its log says what.", actions: ["restart"] },
};

const ERROR_TITLES: Record<string, string> = {
  capacity: "The server is full", session_gone: "Your walk is over", session_not_found: "Your walk is over",
};

export const OPENING: Notice = { title: "Opening the world", text: "The first picture takes a moment.", actions: [], tone: "busy" };
export const BACK: Notice = { title: "The server is back", text: "A new walk begins when you want.", actions: ["restart"], tone: "good" };

const REASONS: Record<string, Notice> = {
  client: { title: "You have left the world", text: "The session is over.", actions: ["restart"], tone: "good" },
  detached_expired: { title: "The session is over", text: "It waited for this page to come back, but not for ever.", actions: ["restart"], tone: "good" },
  stalled: { title: "The session is over", text: "The page did not show pictures for a while.", actions: ["restart"], tone: "bad" },
  evicted: { title: "The session is over", text: "The server needed its place for someone else.", actions: ["restart"], tone: "bad" },
  shutdown: {
    title: "The server has gone away", text: "It was shut down, and no walk outlasts that. This page looks every few seconds whether it is back.",
    actions: ["restart"], tone: "busy",
  },
  failed: { title: "The session has failed", text: "It can't be continued.", actions: ["restart"], tone: "bad" },
  taken_over: { title: "Open in another window", text: "This walk goes on in another window or tab.", actions: ["restart"], tone: "good" },
  operator: { title: "The session was ended", text: "The server's operator has closed it.", actions: ["restart"], tone: "bad" },
};

export function sentence(code: string): string {
  return CODES[code]?.text ?? `The server reported “${code}”.`;
}

/** One sentence, with what the server said in brackets before its full stop. */
export function explain(code: string, detail: string): string {
  const text = sentence(code);
  return detail ? `${text.replace(/\.$/, "")} (${detail.replace(/[.\s]+$/, "")}).` : text;
}

export function errorNotice(code: string, detail = ""): Notice {
  const actions = CODES[code]?.actions ?? ["restart"];
  return { title: ERROR_TITLES[code] ?? "That did not work", text: sentence(code), actions, tone: "bad", detail };
}

export function closedNotice(reason: string, code: string | null, message: string | null): Notice {
  const notice = REASONS[reason] ?? { title: "The session is over", text: `Reason: ${reason}.`, actions: ["restart"], tone: "bad" };
  if (reason === "client" || code === null || code === reason) return notice;
  return { ...notice, text: `${notice.text} ${sentence(code)}`, detail: message ?? "" };
}

/** For a server that has nothing to walk in. */
export function robotsNotice(name: string, address: string): Notice {
  const text = "A robot sends this server what its cameras see, and is told how to move. There is no world to walk in here.";
  const detail = `Robots connect to\n${address}\n\nTo watch one, run\nrealtime-omni demo robot --port 0`;
  return { title: `${name} leads robots`, text, actions: [], tone: "good", detail };
}

/** While no connection can be had. `keptS`: how long the server keeps the walk that waits for it; null: no walk does. */
export function waitingNotice(retryInMs: number, lostForMs: number, keptS: number | null, reachable: boolean): Notice {
  const wait = `Next try in ${Math.max(1, Math.round(retryInMs / 1000))} s.`;
  if (keptS === null) {
    const title = reachable ? "The server takes no one in now" : "The server does not answer";
    return { title, text: `${wait} A walk begins as soon as it does.`, actions: ["retry"], tone: "busy" };
  }
  if (lostForMs < keptS * 1000) return { title: "Reconnecting", text: `A server that still runs keeps your walk. ${wait}`, actions: ["retry"], tone: "busy" };
  const text = `Your walk was kept for ${Math.round(keptS)} s, and that time is over. ${wait}`;
  return { title: "The server does not answer", text, actions: ["retry", "restart"], tone: "busy" };
}

export function failedNotice(code: string, message: string, can: readonly Action[]): Notice {
  return { title: "The world has stopped", text: sentence(code), actions: [...can], tone: "bad", detail: message };
}
