// The build is a function of the sources alone: fixed file names, no source maps, no time stamps. The built page is
// committed in realtime_omni/server/page (it ships in the wheel) and CI compares a fresh build with it byte for byte.
import { fileURLToPath } from "node:url";
import { defineConfig } from "vitest/config";

const here = (path: string) => fileURLToPath(new URL(path, import.meta.url));

export default defineConfig({
  base: "./",
  cacheDir: here("./node_modules/.vite"),
  resolve: { alias: { "@page": here("./src") } },
  build: {
    outDir: here("../../realtime_omni/server/page"),
    emptyOutDir: true,
    target: "es2022",
    sourcemap: false,
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0, // data: URLs would need a wider content security policy than 'self'
    rolldownOptions: {
      input: { page: here("./index.html"), talk: here("./talk.html") },
      output: {
        entryFileNames: "assets/[name].js",
        chunkFileNames: "assets/[name].js", // what both pages share, and the World page's voice control
        assetFileNames: "assets/page[extname]",
      },
    },
  },
  worker: { rolldownOptions: { output: { entryFileNames: "assets/talk-[name].js" } } },
  server: {
    port: 5173,
    fs: { allow: [here("../..")] },
    proxy: { "/v1": { target: process.env.REALTIME_OMNI_URL ?? "http://127.0.0.1:8000", ws: true } },
  },
  test: {
    globals: true,
    root: here("../.."),
    include: ["tests/web/*.test.ts"],
  },
});
