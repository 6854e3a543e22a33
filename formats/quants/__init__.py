"""Reference dequantisers and quantisers of ggml block types."""
