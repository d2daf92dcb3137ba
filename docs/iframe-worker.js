// Browsers start no workers on file://. There the search runs in a hidden frame of the page instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const waiting = [];
      let ready = false;
      const hand = (data) =>
        frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.postMessage = (data) => (ready ? hand(data) : waiting.push(data));
      frame.hidden = true;
      frame.srcdoc = `<script>
        postMessage = (data) => frameElement.dispatchEvent(new MessageEvent("message", { data }));
        </script><script src="${new URL(url, location)}"></script>`;
      frame.addEventListener("message", (event) =>
        this.dispatchEvent(new MessageEvent("message", { data: event.data })),
      );
      frame.addEventListener("load", () => {
        ready = true;
        waiting.forEach(hand);
      });
      document.documentElement.append(frame);
    }
  };
}
