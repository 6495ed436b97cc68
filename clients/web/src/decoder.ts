// Frames of one format become pictures, in order. Owns the browser's decoders; knows nothing of sessions or time.
// A decoder that can't go on calls onFailure once; the owner then asks the server for another format.

import type { Format, Frame } from "./protocol";

export type Picture = ImageBitmap | VideoFrame;
export interface Decoder { decode(frame: Frame): void; close(): void }
export interface DecoderOptions {
  format: Format; codec: string | null; width: number; height: number;
  onPicture: (frame: Frame, picture: Picture) => void; onFailure: (reason: string) => void;
}

const SMALL_PIXELS = 640 * 480; // below this a hardware decoder costs more than it saves, and some refuse tiny pictures
const SILENCE_MS = 4_000; // a decoder that was fed and shows nothing for this long is taken for broken

/** The best format that this browser decodes. */
export async function preferredFormat(): Promise<Format> {
  if (typeof VideoDecoder === "undefined") return "jpeg"; // also outside a secure context, such as http to another host
  try {
    const support = await VideoDecoder.isConfigSupported({ codec: "avc1.42c01f", optimizeForLatency: true });
    return support.supported ? "h264" : "jpeg";
  } catch {
    return "jpeg";
  }
}

export function createDecoder(options: DecoderOptions): Decoder {
  if (options.format === "h264") return new H264Decoder(options);
  return new PictureDecoder(options);
}

/** Annex B through WebCodecs: no description, one access unit per frame, no reordering. */
class H264Decoder implements Decoder {
  private readonly decoder: VideoDecoder;
  private readonly inFlight = new Map<number, Frame>();
  private readonly watchdog: number;
  private timestamp = 0;
  private waitsForKey = true;
  private failed = false;
  private lastSignAt = performance.now();

  constructor(private readonly options: DecoderOptions) {
    this.decoder = new VideoDecoder({ output: (video) => this.output(video), error: (error) => this.fail(error.message) });
    this.decoder.configure({
      codec: options.codec ?? "avc1.42c01f",
      optimizeForLatency: true,
      hardwareAcceleration: options.width * options.height < SMALL_PIXELS ? "prefer-software" : "no-preference",
    });
    this.watchdog = window.setInterval(() => {
      if (this.inFlight.size > 0 && performance.now() - this.lastSignAt > SILENCE_MS) this.fail("the decoder gives no pictures");
    }, 1_000);
  }

  decode(frame: Frame): void {
    if (this.failed || (this.waitsForKey && !frame.key)) return;
    this.waitsForKey = false;
    if (this.inFlight.size === 0) this.lastSignAt = performance.now();
    const timestamp = (this.timestamp += 1_000); // microseconds; only its order and identity matter
    this.inFlight.set(timestamp, frame);
    try {
      this.decoder.decode(new EncodedVideoChunk({ type: frame.key ? "key" : "delta", timestamp, data: frame.payload }));
    } catch (error) {
      this.fail(String(error));
    }
  }

  close(): void {
    this.failed = true;
    clearInterval(this.watchdog);
    if (this.decoder.state !== "closed") this.decoder.close();
  }

  private output(video: VideoFrame): void {
    const frame = this.inFlight.get(video.timestamp);
    this.inFlight.delete(video.timestamp);
    this.lastSignAt = performance.now();
    if (frame && !this.failed) this.options.onPicture(frame, video);
    else video.close();
  }

  private fail(reason: string): void {
    if (this.failed) return;
    this.close();
    this.options.onFailure(reason);
  }
}

/** JPEG and raw RGB: every frame stands alone; decoding is asynchronous and delivered in order. */
class PictureDecoder implements Decoder {
  private tail: Promise<void> = Promise.resolve();
  private closed = false;

  constructor(private readonly options: DecoderOptions) {}

  decode(frame: Frame): void {
    const picture = this.picture(frame);
    picture.catch(() => undefined); // seen below, in order
    this.tail = this.tail.then(async () => {
      try {
        const bitmap = await picture;
        if (this.closed) bitmap.close();
        else this.options.onPicture(frame, bitmap);
      } catch (error) {
        if (!this.closed) this.options.onFailure(String(error));
      }
    });
  }

  close(): void {
    this.closed = true;
  }

  private picture(frame: Frame): Promise<ImageBitmap> {
    if (frame.format === "jpeg") {
      return createImageBitmap(new Blob([frame.payload as Uint8Array<ArrayBuffer>], { type: "image/jpeg" }));
    }
    if (frame.format !== "rgb24") return Promise.reject(new Error(`${frame.format} can't be shown`));
    return createImageBitmap(rgbaOf(frame.payload, this.options.width, this.options.height));
  }
}

function rgbaOf(rgb: Uint8Array, width: number, height: number): ImageData {
  if (rgb.length !== width * height * 3) throw new Error("rgb24 frame of the wrong size");
  const image = new ImageData(width, height);
  for (let i = 0, o = 0; i < rgb.length; i += 3, o += 4) {
    image.data[o] = rgb[i]!;
    image.data[o + 1] = rgb[i + 1]!;
    image.data[o + 2] = rgb[i + 2]!;
    image.data[o + 3] = 255;
  }
  return image;
}
