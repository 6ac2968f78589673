// Search runs in a worker, which browsers refuse to a page that was opened from disk. There a hidden frame takes its
// place: the same script, its messages handed over by calls. Pages that come from a server keep the real worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = new URL(url, document.baseURI).href.replace(/"/g, "%22");
      this.frame.srcdoc = `<script>window.postMessage = (data) => frameElement.answer(data)</script><script src="${script}"></script>`;
      this.ready = new Promise((loaded) => this.frame.addEventListener("load", loaded, { once: true }));
      document.body.append(this.frame);
    }
    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
