// Steering by voice: a call beside the world's session. What the voice calls is done by the page, as its own next event. Loaded when
// somebody speaks: who walks with keys needs none of it. Owns the call, its sound and its captions.

import { apiKey, type Voice } from "../api";
import { stepOf, TOOLS, type Step } from "../steering";
import { Captions, type Line } from "../talk/captions";
import { toBase64, type VoiceEvent } from "../talk/events";
import { MICROPHONE_GONE, notice, sentence, SILENT_MICROPHONE, WRONG_RATE } from "../talk/messages";
import { CallSocket } from "../talk/socket";
import { Sound, SoundError } from "../talk/sound";
import type { SpeakerTold } from "../talk/worklet-messages";

export interface VoiceHooks {
  /** Does it, and says what the voice is to know: "ok", or a sentence about why not. */
  onStep: (step: Step) => string;
  onCaptions: (lines: readonly Line[]) => void;
  onLevel: (level: number) => void;
  onLive: () => void;
  /** The call is over; a text when the user did not end it. */
  onEnd: (why: string | null) => void;
  onNote: (text: string) => void;
}

const DONE = "ok";
const UNKNOWN = "That is nothing that this page can do.";
const INSTRUCTIONS = "You steer the world that the user sees, by calling tools. Say at most one short sentence.";

export class VoiceControl {
  private readonly sound = new Sound({
    onPacket: ({ samples, level }) => {
      this.hooks.onLevel(level);
      this.socket.send({ type: "input_audio_buffer.append", audio: toBase64(samples) });
    },
    onSpeaker: (told) => this.played(told),
    onMicrophoneLost: () => this.end(MICROPHONE_GONE),
    onDevices: () => undefined,
  });
  private readonly socket: CallSocket;
  private readonly captions = new Captions();
  private calls: string[] = []; // what was not "ok" of the answer under way, or all that an answer without a word called
  private called = 0;
  private cut: string | null = null; // an answer that was interrupted and whose heard part is not known yet
  private over = false;

  constructor(url: string, private readonly voice: Voice, private readonly model: string, private readonly hooks: VoiceHooks) {
    this.socket = new CallSocket(url, () => apiKey.get(), {
      onLink: () => undefined,
      onEvent: (event) => this.received(event),
      onGone: (why) => this.end(notice(why).title),
    });
  }

  /** To be called from a click. */
  async begin(): Promise<void> {
    try {
      await this.sound.open();
      await this.sound.listen(null);
    } catch (error) {
      return this.end(notice(error instanceof SoundError ? error.code : "insecure").title);
    }
    if (!this.over) this.socket.start();
  }

  end(why: string | null = null): void {
    if (this.over) return;
    this.over = true;
    this.socket.send({ type: "session.close" });
    this.socket.drop();
    this.sound.close();
    this.hooks.onEnd(why);
  }

  private received(event: VoiceEvent): void {
    switch (event.kind) {
      case "created":
        this.configure();
        return this.hooks.onLive();
      case "heard": this.captions.begin(event.itemId, "user"); break;
      case "words": this.captions.words(event.itemId, event.who, event.text); break;
      case "text":
        if (event.who === "user") this.captions.userSaid(event.itemId, event.text);
        else this.captions.heard(event.itemId, event.text);
        break;
      case "sound": return this.sound.say(event.itemId, event.samples);
      case "call": return this.call(event.callId, event.name, event.args);
      case "answered": this.answered(event.status, event.itemIds); break;
      case "trouble": return this.hooks.onNote(event.what === "wrong_rate" ? WRONG_RATE : SILENT_MICROPHONE);
      case "error": return this.hooks.onNote(sentence(event.code, event.message));
      case "closed": return this.end(notice(event.reason).title);
      default: return;
    }
    this.hooks.onCaptions(this.captions.lines);
  }

  private configure(): void {
    const detection = { type: this.voice.turn_modes[0] === "semantic" ? "semantic_vad" : "server_vad" };
    const input = { transcription: { model: this.model }, turn_detection: detection };
    const session = { type: "realtime", audio: { input }, tools: TOOLS, ...(this.voice.takes_text ? { instructions: INSTRUCTIONS } : {}) };
    this.socket.send({ type: "session.update", session });
  }

  private call(callId: string, name: string, args: string): void {
    const step = stepOf(name, args);
    const output = step === null ? UNKNOWN : this.hooks.onStep(step);
    this.called += 1;
    if (output !== DONE) this.calls.push(output);
    this.socket.send({ type: "conversation.item.create", item: { type: "function_call_output", call_id: callId, output } });
  }

  private answered(status: string, itemIds: string[]): void {
    for (const id of itemIds) this.captions.end(id);
    const wantsWords = this.calls.length > 0 || (this.called > 0 && itemIds.length === 0);
    this.calls = [];
    this.called = 0;
    if (status === "cancelled") {
      this.cut = itemIds.at(-1) ?? null;
      return this.sound.flush();
    }
    this.sound.end();
    if (wantsWords) this.socket.send({ type: "response.create" }); // it may say what came of its calls
  }

  /** After an interruption the conversation keeps what was heard. */
  private played(told: SpeakerTold): void {
    if (!told.flushed || this.cut === null) return;
    const heard = told.item === this.cut ? Math.max(0, Math.round(told.ms - this.sound.outputLatencyMs)) : 0;
    this.socket.send({ type: "conversation.item.truncate", item_id: this.cut, content_index: 0, audio_end_ms: heard });
    this.socket.send({ type: "conversation.item.retrieve", item_id: this.cut });
    this.cut = null;
  }
}
