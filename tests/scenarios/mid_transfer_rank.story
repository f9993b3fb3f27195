A rank is killed while it captures, and while its node sends the version before: that one is resumed from

job    megatron or deepspeed, tp2 pp2 dp2, 4 nodes, distributed optimizer, 20 iterations
flags  --baft --baft-profile-iterations 2 --reft-exchange-interval 4
runs   with all configurations
# version 8 is held half sent, version 9 ends half captured
fault  n2 exchange.frame@epoch=1,iteration=8,frame=1:hold;capture.bucket.end@rank=5,iteration=9,restart=0:kill
when   the job has ended
then   version 8 was being exchanged
then   every node restored from process, iteration = 8
then   no rank started from scratch
then   the final state is golden
