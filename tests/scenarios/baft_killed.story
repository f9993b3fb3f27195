A node is killed; copies had gone to the neighbouring stage while the pipeline was idle

job   megatron or deepspeed, tp2 pp2 dp2, 4 nodes, distributed optimizer, 60 iterations
flags --baft
runs  with all configurations
when  version 14 is committed on every node
do    kill n2
do    start s first
when  the job has ended
then  s restored from node, iteration >= 14
then  copies went out in bubbles
then  the final state is golden
