One of three replicas is struck and repaired; then a node is killed, and what comes back is certified

job    megatron or deepspeed, tp1 pp2 dp3, 6 nodes, replicated optimizer, 80 iterations, global batch 12
flags  --baft --paft --paft-mode audit --paft-audit-interval 1
runs   with all configurations
fault  n1 update.parameters@iteration=3,rank=1,restart=0:flip=20~5
when   version 14 is committed on every node
do     kill n2
do     start s first
when   the job has ended
then   rank 1 differed in iteration 3
then   s restored from node, iteration >= 14
then   s restored a certified version
then   copies went out in bubbles
then   the final state is golden
