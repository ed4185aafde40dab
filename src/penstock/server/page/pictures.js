// Images of the next message: dropped on the chat or pasted into the draft, and taken back by a
// click. They are sent as data URLs.

import { byId, make } from "./format.js";

/** Height of an image that waits, in pixels. */
const THUMBNAIL = 64;
const TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/** The images that wait to be sent. */
export class Pictures {
  urls = [];
  /** Whether the model reads images. */
  read = false;

  /** `refuse` says why a file is not taken. */
  constructor(refuse) {
    this.refuse = refuse;
    this.list = byId("pictures");
    const chat = byId("chat");
    chat.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    chat.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.take(event.dataTransfer.files);
    });
    byId("draft").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.take(event.clipboardData.files);
    });
  }

  async take(files) {
    if (!this.read) return this.refuse("This model reads no images.");
    for (const file of files) {
      if (!TYPES.includes(file.type)) this.refuse("PNG, JPEG, GIF and WebP images are read.");
      else this.show([...this.urls, await urlOf(file)]);
    }
  }

  show(urls) {
    this.urls = urls;
    this.list.hidden = !urls.length;
    this.list.replaceChildren(
      ...urls.map((url, at) => {
        const words = "Leave this image out";
        const button = make("button", { type: "button", "aria-label": words, title: words }, image(url, THUMBNAIL));
        button.addEventListener("click", () => this.show(urls.filter((_, other) => other !== at)));
        return make("li", {}, button);
      }),
    );
  }

  /** The content of a message with a text: the images in front of it. */
  contentWith(text) {
    if (!this.urls.length) return text;
    const parts = this.urls.map((url) => ({ type: "image_url", image_url: { url } }));
    this.show([]);
    return text ? [...parts, { type: "text", text }] : parts;
  }
}

/** The images of a message's content, and its text. */
export function parted(content) {
  if (typeof content === "string") return { urls: [], text: content };
  const urls = content.filter(({ type }) => type === "image_url").map((part) => part.image_url.url);
  return { urls, text: content.find(({ type }) => type === "text")?.text ?? "" };
}

export function image(url, height) {
  return make("img", { src: url, alt: "An image", height });
}

function urlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
