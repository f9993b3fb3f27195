A node is killed while it sends its copies: what is half there is passed over for the version before

job    megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer, 20 iterations
# a stopped SMP is missed after so long, and before that three iterations go by, on a busy machine too
flags  --baft --baft-profile-iterations 2 --reft-exchange-interval 4 --ftp-detect-seconds 30
fault  n2 exchange.frame@epoch=1,iteration=8,frame=1:stop;exchange.frame@epoch=1,iteration=12,frame=1:stop
when   the smp of n2 has stopped
when   iteration 11 is captured on n0
do     kill n2
do     start s first
when   the job has ended
then   s restored from node, iteration >= 4
then   s restored the committed version, not the one being exchanged
then   no rank started from scratch
then   the final state is golden
