// The page's ears and mouth: one AudioContext at the wire's rate, the microphone or a recording in its place, the speaker, and which
// devices there are. Knows no server.

import workletUrl from "./worklet?worker&url";
import { WIRE_RATE, type MicrophoneTold, type SpeakerAsked, type SpeakerTold } from "./worklet-messages";

export interface SoundHooks {
  onPacket: (packet: MicrophoneTold) => void;
  onSpeaker: (told: SpeakerTold) => void;
  /** The microphone was pulled out, or its permission taken back. */
  onMicrophoneLost: () => void;
  onDevices: () => void;
}

/** A name of messages.ts: what stands between the user and a call. */
export class SoundError extends Error {
  constructor(readonly code: "no_permission" | "no_device" | "device_busy" | "insecure" | "no_recording" | "not_loaded") {
    super(code);
  }
}

const FAULTS: Record<string, SoundError["code"]> = {
  NotAllowedError: "no_permission", SecurityError: "no_permission", NotFoundError: "no_device", OverconstrainedError: "no_device",
};
const RECORDING_LOUDNESS = 0.5; // as the user hears it

export class Sound {
  private context: AudioContext | null = null;
  private ownContext: AudioContext | null = null; // the microphone's, where it can't share the speaker's
  private microphone: AudioWorkletNode | null = null;
  private speaker: AudioWorkletNode | null = null;
  private stream: MediaStream | null = null;
  private source: AudioNode | null = null;
  private recording: AudioBufferSourceNode | null = null;
  private listening = true;

  constructor(private readonly hooks: SoundHooks) {
    navigator.mediaDevices?.addEventListener("devicechange", () => hooks.onDevices());
  }

  /** To be called from a click: browsers give sound to nobody else. Throws SoundError. */
  async open(): Promise<void> {
    if (this.context) return this.context.resume();
    if (!window.isSecureContext) throw new SoundError("insecure");
    const context = new AudioContext({ sampleRate: WIRE_RATE, latencyHint: "interactive" });
    try {
      await context.audioWorklet.addModule(workletUrl);
    } catch {
      void context.close();
      throw new SoundError("not_loaded");
    }
    this.context = context;
    this.speaker = new AudioWorkletNode(context, "speaker", { numberOfInputs: 0, outputChannelCount: [1] });
    this.speaker.port.onmessage = ({ data }: MessageEvent<SpeakerTold>) => this.hooks.onSpeaker(data);
    this.speaker.connect(context.destination);
    this.useMicrophone(makeMicrophone(context));
    await context.resume();
  }

  /** Throws SoundError. */
  async listen(deviceId: string | null): Promise<void> {
    const wanted: MediaTrackConstraints = { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 };
    if (deviceId) wanted.deviceId = { exact: deviceId };
    const { context } = this;
    let stream: MediaStream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: wanted });
    } catch (error) {
      throw new SoundError(FAULTS[(error as DOMException).name] ?? "device_busy");
    }
    if (this.context !== context) { // closed while the browser asked
      for (const track of stream.getTracks()) track.stop();
      return;
    }
    this.deafen();
    this.stream = stream;
    stream.getAudioTracks()[0]!.addEventListener("ended", () => { if (stream === this.stream) this.hooks.onMicrophoneLost(); });
    await this.connect(stream);
    this.hooks.onDevices();
  }

  /** No microphone any more; time goes on in silence. */
  deafen(): void {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.source?.disconnect();
    this.stream = this.source = null;
  }

  get hasMicrophone(): boolean { return this.stream !== null; }

  get microphoneId(): string | null { return this.stream?.getAudioTracks()[0]?.getSettings().deviceId ?? null; }

  /** While false the server hears silence. */
  hear(listening: boolean): void {
    this.listening = listening;
    this.microphone?.port.postMessage(listening);
  }

  /** A recording in place of the microphone, heard here too; resolves at its end. Throws SoundError. */
  async play(url: string): Promise<void> {
    const context = this.context!;
    let buffer: AudioBuffer;
    try {
      buffer = await context.decodeAudioData(await (await fetch(url)).arrayBuffer());
    } catch {
      throw new SoundError("no_recording");
    }
    this.recording?.stop();
    const source = new AudioBufferSourceNode(context, { buffer });
    this.recording = source;
    source.connect(this.microphone!);
    source.connect(new GainNode(context, { gain: RECORDING_LOUDNESS })).connect(context.destination);
    source.start();
    await new Promise((resolve) => { source.onended = resolve; });
    source.disconnect();
  }

  say(item: string, samples: Float32Array<ArrayBuffer>): void { this.ask({ push: samples, item }); }
  end(): void { this.ask("end"); }
  flush(): void { this.ask("flush"); }

  /** What is between the worklet and the ear, as far as the browser knows. */
  get outputLatencyMs(): number { return (this.context?.outputLatency ?? 0) * 1000; }

  async devices(): Promise<MediaDeviceInfo[]> {
    return (await navigator.mediaDevices?.enumerateDevices()) ?? [];
  }

  get choosesSpeaker(): boolean { return "setSinkId" in AudioContext.prototype; }

  async useSpeaker(deviceId: string): Promise<void> {
    await (this.context as AudioContext & { setSinkId: (id: string) => Promise<void> }).setSinkId(deviceId);
  }

  close(): void {
    this.deafen();
    this.recording?.stop();
    void this.context?.close();
    void this.ownContext?.close();
    this.context = this.ownContext = this.microphone = this.speaker = this.recording = null;
  }

  private async connect(stream: MediaStream): Promise<void> {
    try {
      this.source = this.context!.createMediaStreamSource(stream);
    } catch { // some browsers join a microphone only to a context of its own rate
      this.ownContext ??= new AudioContext({ latencyHint: "interactive" });
      await this.ownContext.audioWorklet.addModule(workletUrl);
      this.useMicrophone(makeMicrophone(this.ownContext));
      this.source = this.ownContext.createMediaStreamSource(stream);
    }
    this.source.connect(this.microphone!);
  }

  private useMicrophone(node: AudioWorkletNode): void {
    if (this.microphone) this.microphone.port.onmessage = null;
    this.microphone = node;
    node.port.onmessage = ({ data }: MessageEvent<MicrophoneTold>) => this.hooks.onPacket(data);
    node.port.postMessage(this.listening);
  }

  private ask(asked: SpeakerAsked): void {
    this.speaker?.port.postMessage(asked, typeof asked === "string" ? [] : [asked.push.buffer as ArrayBuffer]);
  }
}

function makeMicrophone(context: AudioContext): AudioWorkletNode {
  const node = new AudioWorkletNode(context, "microphone", { outputChannelCount: [1], channelCount: 1, channelCountMode: "explicit" });
  node.connect(context.destination); // its output is silence; a node that leads nowhere is not run
  return node;
}
