"""DeepSpeed's interface over an offload engine: `import offload.deepspeed as deepspeed`."""
