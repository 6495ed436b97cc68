// Draws the world: once in its own size (`world`, what tests and the glow read), once as large as the stage.
// Owns the canvases' backing stores. 128x128 pixels become 600 or more on a side, so the upscaling is done here with the
// browser's best filter (bicubic in Chromium) at device resolution instead of by the compositor's bilinear one.

import type { Picture } from "./decoder";

/** A decoded frame, or a canvas with a picture of before. */
type Drawable = Picture | HTMLCanvasElement;

const GLOW_PIXELS = 8; // the glow is the world averaged to this many pixels a side, spread out behind the stage

export class WorldPicture {
  readonly world = document.createElement("canvas");
  private readonly spread = document.createElement("canvas");
  private readonly worldContext: CanvasRenderingContext2D;
  private readonly viewContext: CanvasRenderingContext2D;
  private readonly glowContext: CanvasRenderingContext2D | null;
  private empty = true;

  constructor(private readonly view: HTMLCanvasElement, glow: HTMLCanvasElement | null) {
    this.worldContext = this.world.getContext("2d", { alpha: false, willReadFrequently: true })!;
    this.viewContext = view.getContext("2d", { alpha: false })!;
    this.glowContext = glow?.getContext("2d", { alpha: false }) ?? null;
    this.spread.width = this.spread.height = GLOW_PIXELS;
    if (glow) glow.width = glow.height = GLOW_PIXELS * 6;
    new ResizeObserver(() => this.fit()).observe(view);
  }

  /** The size of the world's frames. */
  resize(width: number, height: number): void {
    this.world.width = width;
    this.world.height = height;
    this.view.parentElement?.style.setProperty("--aspect", String(width / height));
    this.fit();
  }

  draw(picture: Drawable): void {
    this.worldContext.drawImage(picture, 0, 0, this.world.width, this.world.height);
    this.empty = false;
    this.paint();
  }

  clear(): void {
    this.empty = true;
    for (const context of [this.worldContext, this.viewContext, this.glowContext]) {
      if (!context) continue;
      context.fillStyle = "#0b0e14";
      context.fillRect(0, 0, context.canvas.width, context.canvas.height);
    }
  }

  private fit(): void {
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    const width = Math.round(this.view.clientWidth * scale);
    const height = Math.round(this.view.clientHeight * scale);
    if (width === 0 || (width === this.view.width && height === this.view.height)) return;
    this.view.width = width;
    this.view.height = height;
    if (this.empty) this.clear();
    else this.paint();
  }

  private paint(): void {
    const { viewContext, glowContext, spread } = this;
    viewContext.imageSmoothingEnabled = true;
    viewContext.imageSmoothingQuality = "high";
    viewContext.drawImage(this.world, 0, 0, this.view.width, this.view.height);
    if (!glowContext) return;
    const spreadContext = spread.getContext("2d", { alpha: false })!;
    spreadContext.imageSmoothingQuality = "medium";
    spreadContext.drawImage(this.world, 0, 0, spread.width, spread.height);
    glowContext.imageSmoothingQuality = "high";
    glowContext.globalAlpha = 0.5; // follows the picture slowly, so that it glows and does not flicker
    glowContext.drawImage(spread, 0, 0, glowContext.canvas.width, glowContext.canvas.height);
  }
}
