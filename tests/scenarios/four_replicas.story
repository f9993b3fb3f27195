One of four data-parallel replicas is killed

job   megatron, tp2 pp2 dp4, 4 nodes, distributed optimizer
runs  with all configurations
when  version 2 is committed on every node
do    kill n3
do    start s first
when  the job has ended
then  s restored from node, iteration >= 2
then  the final state is golden
