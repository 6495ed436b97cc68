// The bundled questions of the "no microphone?" mode; made with hibari (Apache-2.0), MP3 of 16 kHz, which every browser
// decodes. Files are in public/questions.

export const QUESTIONS = [
  { name: "capital", text: "What is the capital of France?" },
  { name: "sum", text: "What is seven times eight?" },
  { name: "story", text: "Please tell me about the moon." },
] as const;

export type Question = (typeof QUESTIONS)[number];
