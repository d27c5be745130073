"""Measure on another machine, which is reached by ssh: `--target ssh://user@board`.

    this machine                                        the board
    network -> ONNX file -> [client] ---- ssh ---- [agent] -> runner and meter
    profile  <- sample   <-                       <-

The agent is started by your own ssh command, with your keys and configuration; no port is opened and nothing is
installed or stored on the board. It needs Python 3.10 and what the runner needs: onnxruntime or OpenVINO, and NumPy.
"""
