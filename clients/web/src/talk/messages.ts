// Words for people: what stands in the way of a call, and what can be done. Pure.

export interface Notice { title: string; text: string }

const NOTICES: Record<string, Notice> = {
  no_permission: { title: "The microphone is not allowed", text: "Allow it in the browser's address bar and try again, or go on without one." },
  no_device: { title: "There is no microphone", text: "Connect one and try again, or go on without." },
  device_busy: { title: "The microphone can't be used", text: "Another program may be using it. Try again, or go on without." },
  insecure: { title: "Not on this address", text: "Browsers give sound to pages on https or on localhost only. Open the page under such an address." },
  no_recording: { title: "The question can't be played", text: "The recording did not load." },
  not_loaded: { title: "That did not load", text: "A part of this page did not arrive. Try again." },
  refused: { title: "The server takes no calls now", text: "All its places are taken, or it is stopping. Try again when someone leaves." },
  unreachable: { title: "The server does not answer", text: "It may be stopped. This page looks every few seconds whether it is back." },
  server_shutdown: { title: "The server has gone away", text: "It was shut down, and no call outlasts that. This page looks every few seconds whether it is back." },
  back: { title: "The server is back", text: "Talk again when you like." },
  lost: { title: "The connection is lost", text: "It did not come back in time, so the call is over." },
  ended: { title: "The call is over", text: "The server has ended it." },
  replaced: { title: "Open in another window", text: "The call goes on in another window or tab." },
  client: { title: "The call is over", text: "Talk again when you like." },
  origin_refused: { title: "Not on this address", text: "The server does not accept this page's address. Open it under the server's own address, or allow this origin." },
};

const ERRORS: Record<string, string> = {
  input_audio_buffer_commit_empty: "Nothing was said.",
  rate_limit_exceeded: "The server can't keep up with so much sound.",
  conversation_already_has_active_response: "It is answering already.",
  server_overloaded: "The server is full.",
  server_shutdown: "The server is shutting down.",
  session_expired: "The call has come to its end.",
  model_failed: "The model could not answer.",
  internal_error: "Something went wrong in the server. Its log says what.",
};

export function notice(code: string): Notice {
  return NOTICES[code] ?? { title: "That did not work", text: `Reason: ${code}.` };
}

export function sentence(code: string, message: string): string {
  return ERRORS[code] ?? `The server reported “${code}”${message ? `: ${message}` : ""}`;
}

export const SILENT_MICROPHONE = "Nothing comes from the microphone. Is another one chosen, or is it switched off?";
export const WRONG_RATE = "The microphone's sound comes at a wrong pace.";
export const TEXT_ONLY = "No speech came with this answer: the server's voice may lack its synthesizer.";
export const MICROPHONE_GONE = "The microphone is gone. Choose another one, or play a question.";
export const NO_MICROPHONE = "Play one of the questions, or type. Play another while it speaks to interrupt it.";
export const HOLD_TO_TALK = "Hold it down while you speak.";
